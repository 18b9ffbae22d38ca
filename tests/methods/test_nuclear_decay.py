"""NuclearDecay: nuclear norms of the products from QR factors, with the gradient U V^T."""

from __future__ import annotations

import pytest
import torch
from methods.test_product_decay import products
from methods.weight_hosts import ids, model

import headwise
from headwise import NuclearDecay
from headwise.attend.methods.nuclear_decay import norms_by_products, nuclear_norm
from headwise.attend.projections.gram_penalty import Weighted, gram_penalty


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


def decaying(heads, size, width, least):
    """Return factors whose rows are of sizes from 1 down to `least` in turned directions."""
    turned = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float64))[0]
    return (turned * torch.logspace(0, least, size, dtype=torch.float64)) @ torch.randn(
        heads, size, width, dtype=torch.float64
    )


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        (lambda width: torch.randn(3, 16, width, dtype=torch.float64), 1e-12),
        # of rank 5
        (lambda width: torch.randn(3, 16, 5).double() @ torch.randn(3, 5, width).double(), 1e-8),
        (lambda width: decaying(3, 16, width, -1), 1e-10),
        # the least singular values are a millionth of the largest, where those of QR factors end too
        (lambda width: decaying(3, 16, width, -3), 1e-4),
        (lambda width: torch.zeros(3, 16, width, dtype=torch.float64), 0.0),
    ],
)
def test_norms_by_products_of_small_matrices_are_those_of_a_decomposition(make, tolerance):
    torch.manual_seed(0)
    a, b = (make(width).requires_grad_() for width in (40, 30))
    by_products = gram_penalty([Weighted((a, b), torch.tensor(0.25))], norms_by_products, torch.float64)[0]
    exact = 0.25 * nuclear_norm(a, b).sum()
    assert abs(by_products.item() - exact.item()) <= tolerance * exact.item()
    for got, want in zip(torch.autograd.grad(by_products, (a, b)), torch.autograd.grad(exact, (a, b)), strict=True):
        assert (got - want).abs().max() <= tolerance * want.abs().max()


def test_gradients_of_fp32_factors_are_those_of_fp64():
    torch.manual_seed(0)
    wide = [torch.randn(4, 16, 40, dtype=torch.float64).requires_grad_() for _ in "ab"]
    narrow = [x.detach().float().requires_grad_() for x in wide]
    results = []
    for factors in (wide, narrow):
        total = gram_penalty([Weighted(tuple(factors), torch.tensor(1.0))], norms_by_products, torch.float64)[0]
        results.append([total, *torch.autograd.grad(total, factors)])
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_factors_that_share_no_direction_have_norm_zero_and_finite_gradients():
    a, b = (torch.zeros(1, 4, 6, dtype=torch.float64) for _ in "ab")
    a[:, :2], b[:, 2:] = 1.0, 1.0
    a, b = a.requires_grad_(), b.requires_grad_()
    total = gram_penalty([Weighted((a, b), torch.tensor(1.0))], norms_by_products, torch.float64)[0]
    assert total == 0 and all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(total, (a, b)))


def test_whether_the_method_can_still_act_is_asked_once_in_a_step(monkeypatch):
    net = model()
    handle = headwise.regularize(net, NuclearDecay())
    asked = []
    refuse = NuclearDecay.refuse
    monkeypatch.setattr(NuclearDecay, "refuse", lambda self, site: asked.append(site.name) or refuse(self, site))
    net(ids())
    handle.loss().backward()
    handle.after_step()
    assert asked == ["layers.0", "layers.1"]
    # Without loss() after the last forward, after_step() asks.
    net(ids())
    net.requires_grad_(False)
    with pytest.raises(RuntimeError, match="can no longer act"):
        handle.after_step()
