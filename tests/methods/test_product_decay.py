"""ProductDecay: half the squared Frobenius norms of the products, without making them."""

from __future__ import annotations

import copy

import pytest
import torch
from methods.weight_hosts import HEADS, WIDTH, ids, loss_of, model

import headwise
from headwise import NuclearDecay, ProductDecay
from headwise.attend.methods.product_decay import half_squares
from headwise.attend.projections.gram_penalty import Weighted, gram_penalty

SIZE = WIDTH // HEADS


def products(layer):
    """Make W_K^T W_Q and W_O W_V of each head as full matrices."""
    groups = layer.groups
    q, k, v = layer.c_attn.weight.split([WIDTH, groups * SIZE, groups * SIZE])
    made = []
    for h in range(HEADS):
        g = h // (HEADS // groups)
        rows, shared = slice(h * SIZE, (h + 1) * SIZE), slice(g * SIZE, (g + 1) * SIZE)
        made += [k[shared].t() @ q[rows], layer.c_proj.weight[:, rows] @ v[shared]]
    return made


@pytest.mark.parametrize("groups", [3, 1])
def test_the_penalty_and_its_gradient_are_those_of_the_products(groups):
    net = model(groups=groups)
    handle = headwise.regularize(net, ProductDecay(strength=0.3))
    net(ids())
    want = 0.15 * sum(p.square().sum() for layer in net.layers for p in products(layer))
    got = handle.loss()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    weights = [net.layers[0].c_attn.weight, net.layers[1].c_proj.weight]
    for a, b in zip(torch.autograd.grad(got, weights), torch.autograd.grad(want, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cls", [ProductDecay, NuclearDecay])
def test_double_precision_is_kept(cls):
    net = model().double()
    handle = headwise.regularize(net, cls(strength=0.5))
    net(ids())
    made = [p for layer in net.layers for p in products(layer)]
    want = sum(
        0.25 * p.square().sum() if cls is ProductDecay else 0.5 * torch.linalg.matrix_norm(p, "nuc") for p in made
    )
    got = handle.loss()
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


def test_it_counts_once_per_loss_and_not_in_evaluation():
    net = model()
    handle = headwise.regularize(net, ProductDecay(strength=1.0))
    net(ids())
    once = handle.loss()
    for seed in range(3):
        net(ids(seed=seed))
    torch.testing.assert_close(handle.loss(), once)
    net.eval()
    net(ids())
    assert handle.loss() == 0


@pytest.mark.parametrize("cls", [ProductDecay, NuclearDecay])
def test_its_strength_can_change_while_training(cls):
    net = model()
    handle = headwise.regularize(net, cls(strength=1.0))
    net(ids())
    once = handle.loss()
    handle.set(cls, strength=0.25)
    net(ids())
    torch.testing.assert_close(handle.loss(), 0.25 * once)
    twin = copy.deepcopy(net)
    headwise.handle(twin).set(cls, strength=0.5)
    for one, share in ((twin, 0.5), (net, 0.25)):
        one(ids())
        torch.testing.assert_close(headwise.handle(one).loss(), share * once)


def test_training_with_it_shrinks_the_products():
    plain, decayed = model(), model()
    handle = headwise.regularize(decayed, ProductDecay(strength=0.5))
    for net, penalty in ((plain, lambda: 0.0), (decayed, handle.loss)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            (loss_of(net, ids(seed=step)) + penalty()).backward()
            optimizer.step()
    size = lambda net: sum(p.detach().square().sum() for p in products(net.layers[0]))
    assert size(decayed) < 0.8 * size(plain)


def test_the_gram_form_agrees_with_the_product():
    a, b = torch.randn(2, 4, 9), torch.randn(2, 4, 7)
    torch.testing.assert_close(half_squares(a @ a.mT, b @ b.mT)[0], 0.5 * (a.mT @ b).square().sum((-1, -2)))


def products_of(sizes, dtype=torch.float64):
    """Return random factors of products of several shapes, and their strengths."""
    torch.manual_seed(0)
    made = [[torch.randn(h, d, c, dtype=dtype, requires_grad=True) for c in (9, 7)] for h, d in sizes]
    return made, [Weighted((a, b), torch.tensor(0.1 * (at + 1))) for at, (a, b) in enumerate(made)]


def half_of_squares(products):
    return sum(0.5 * one.strength * (one.factors[0].mT @ one.factors[1]).square().sum() for one in products)


def test_products_of_several_shapes_and_strengths_are_put_together_by_shape():
    made, products = products_of([(2, 4), (3, 4), (2, 4), (2, 5)])
    terms = gram_penalty(products, half_squares)
    assert len(terms) == 3
    inputs = [x for pair in made for x in pair]
    for got, want in zip(
        torch.autograd.grad(sum(terms), inputs), torch.autograd.grad(half_of_squares(products), inputs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_frozen_factors_get_no_gradient_and_second_derivatives_are_exact():
    made, products = products_of([(2, 4)])
    made[0][1].requires_grad_(False)
    a = made[0][0]
    seconds = []
    for total in (sum(gram_penalty(products, half_squares)), half_of_squares(products)):
        (first,) = torch.autograd.grad(total, [a], create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), [a])[0])
    torch.testing.assert_close(*seconds, rtol=1e-10, atol=1e-10)


def test_a_compiled_loss_has_the_same_gradients():
    made, products = products_of([(2, 4), (2, 4)])
    inputs = [x for pair in made for x in pair]
    compiled = torch.compile(lambda: sum(gram_penalty(products, half_squares)), backend="eager", fullgraph=True)
    for got, want in zip(
        torch.autograd.grad(compiled(), inputs), torch.autograd.grad(half_of_squares(products), inputs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_negative_strength_is_refused():
    with pytest.raises(ValueError, match="strength must be at least 0, got -1"):
        ProductDecay(strength=-1.0)
