"""The cosine of the functional's two gradients, against autograd on the functional itself."""

import torch

from headwise.health.statistics import Reading, read


def _reading(queries_are_keys=False):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, 7, 4, generator=generator) for _ in range(3))
    return Reading(q=k if queries_are_keys else q, k=k, v=v, scale=0.5)


def _functional(u, kernel):
    """J(u) = ½ Σ_ij k_ij ‖u_i − u_j‖² with k = K/2 and K symmetric."""
    return (kernel * (u[:, :, :, None] - u[:, :, None]).square().sum(-1)).sum() / 4


def test_the_symmetric_gradient_is_that_of_the_functional_and_the_cosine_that_of_both():
    found = _reading()
    q, k, v = found.q.double(), found.k.double(), found.v.double()
    symmetric, own = (k @ k.mT / 2).exp(), (q @ k.mT / 2).exp()
    u = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_functional(u, symmetric), u)
    step = (own[..., None] * (v[:, :, None] - v[:, :, :, None])).sum(-2)
    cosine = torch.nn.functional.cosine_similarity(gradient, -step, dim=-1).mean((0, 2))
    value = read(found, ["gradient_cosine"])["gradient_cosine"].value().double()
    assert torch.allclose(value, cosine, atol=1e-5)
    # the two differ: were they alike, nothing would be tested
    assert (cosine < 0.95).all()


def test_a_step_of_attention_goes_against_the_asymmetric_gradient():
    found = _reading()
    q, k, v = found.q.double(), found.k.double(), found.v.double()
    kernel = (q @ k.mT / 2).exp()
    gradient = (kernel[..., None] * (v[:, :, :, None] - v[:, :, None])).sum(-2)
    attended = torch.softmax(q @ k.mT / 2, -1) @ v
    assert torch.allclose(v - gradient / kernel.sum(-1, keepdim=True), attended)


def test_queries_that_stand_for_keys_give_one():
    value = read(_reading(queries_are_keys=True), ["gradient_cosine"])["gradient_cosine"].value()
    assert torch.allclose(value, torch.ones(3), atol=1e-6)
