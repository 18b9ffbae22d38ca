"""Gradient penalties and Hessians: second derivatives of methods whose attention is an operator of headwise's own."""

import pytest
import torch
from naive import PADDING, qkv

from headwise.attend.methods import AttentionNormPenalty, AttentionSink, DropAttention, DropKey, EntropyPenalty, ZLoss
from headwise.attend.methods.nuclear_decay import nuclear_norm
from headwise.testing.calls import attend_with

METHODS = (
    EntropyPenalty(strength=1.0),
    ZLoss(strength=1.0),
    AttentionNormPenalty(strength=100.0),
    AttentionSink(),
    DropKey(p=0.4),
    DropAttention(p=0.4, unit="element"),
    DropAttention(p=0.4, unit="element", window=2),
)


def curvature(method, form, **settings):
    """The gradient of the squared gradient of a loss, for q, k and v."""
    inputs = [x.double().requires_grad_() for x in qkv()]
    out, penalty = attend_with([method], *inputs, form=form, **settings)
    slopes = torch.autograd.grad(out.square().sum() + penalty, inputs, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in slopes), inputs)


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_second_derivatives_are_those_of_the_textbook(method, settings):
    for found, right in zip(
        curvature(method, "fast", **settings), curvature(method, "textbook", **settings), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-10)


def test_second_derivatives_of_nuclear_norms_are_those_of_singular_values():
    torch.manual_seed(0)
    # two heads, three rows of each, as queries and keys have them
    factors = [torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    directions = [torch.randn_like(factor) for factor in factors]

    def curved(norms):
        slopes = torch.autograd.grad(norms.square().sum(), factors, create_graph=True)
        # along the gradient itself, constant singular vectors would do
        along = sum((slope * direction).sum() for slope, direction in zip(slopes, directions, strict=True))
        return torch.autograd.grad(along, factors)

    a, b = factors
    right = curved(torch.linalg.svdvals(a.mT @ b)[:, :3].sum(1))
    for found, expected in zip(curved(nuclear_norm(a, b)), right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
