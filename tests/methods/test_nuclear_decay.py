"""NuclearDecay: nuclear norms of the products from QR factors, with the gradient U V^T."""

from __future__ import annotations

import pytest
import torch
from methods.test_product_decay import products
from methods.weight_hosts import ids, model

import headwise
from headwise import NuclearDecay
from headwise.methods.nuclear_decay import nuclear_norm


@pytest.mark.parametrize("groups", [3, 1])
def test_the_penalty_and_its_gradient_are_those_of_the_products(groups):
    net = model(groups=groups)
    handle = headwise.regularize(net, NuclearDecay(strength=0.3))
    net(ids())
    got = handle.loss()
    want = 0.3 * sum(torch.linalg.svdvals(p).sum() for layer in net.layers for p in products(layer))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weights = [net.layers[0].c_attn.weight, net.layers[1].c_proj.weight]
    grads = torch.autograd.grad(got, weights)
    # The exact gradient from the singular vectors of the full products.
    surrogate = 0.0
    for layer in net.layers:
        for p in products(layer):
            u, s, vh = torch.linalg.svd(p.detach().double(), full_matrices=False)
            real = s > 1e-6 * s[0]
            surrogate = surrogate + (p * (u[:, real] @ vh[real]).float()).sum()
    for a, b in zip(grads, torch.autograd.grad(0.3 * surrogate, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_equal_singular_values_and_a_zero_factor_give_finite_gradients():
    a = torch.eye(3, 5).unsqueeze(0).requires_grad_()
    b = torch.eye(3, 4).unsqueeze(0).requires_grad_()
    norm = nuclear_norm(a, b).sum()
    assert norm.item() == pytest.approx(3.0)
    ga, gb = torch.autograd.grad(norm, (a, b))
    torch.testing.assert_close(ga, a.detach())
    torch.testing.assert_close(gb, b.detach())
    zero = torch.zeros(1, 3, 5, requires_grad=True)
    norm = nuclear_norm(zero, b).sum()
    assert norm.item() == 0.0
    assert torch.autograd.grad(norm, zero)[0].isfinite().all()


def test_the_norm_is_at_most_the_mean_of_the_squared_factors():
    a, b = torch.randn(4, 6, 20), torch.randn(4, 6, 30)
    bound = 0.5 * (a.square().sum((-1, -2)) + b.square().sum((-1, -2)))
    assert (nuclear_norm(a, b) < bound).all()


def test_a_negative_strength_is_refused():
    with pytest.raises(ValueError, match="strength must be at least 0, got -1"):
        NuclearDecay(strength=-1.0)
