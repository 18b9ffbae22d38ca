"""Penalties on the products AᵀB of all heads of a model, computed from the Gram matrices AAᵀ and BBᵀ.

The value f of a head is a function of both, and its gradients are Z·A and W·B with symmetric Z and W (d, d). The Gram
matrices of all products of one shape are put together, so that the small matrices of a whole model take one operator
where those of a layer would, and the backward is one product for each factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attend.core.method_state import strengths_on
from headwise.borders import in_transform
from headwise.numerics.operators import without_autocast

Factors = tuple[Tensor, Tensor]
# from the Gram matrices of A and of B, each (N, d, d), to the values (N,), Z and W
Form = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Weighted(NamedTuple):
    """The factors (H, d, C) and (H, d, C') of the products of one layer, and the strength that multiplies them, 0-d."""

    factors: Factors
    strength: Tensor


def gram_penalty(products: Sequence[Weighted], form: Form, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return terms, 0-d, whose sum is the sum of strength·f over all heads of all products.

    Products whose factors agree in heads, head size, dtype and device become one term. The Gram matrices have `dtype`,
    or that of the factors.
    """
    groups: dict[Any, list[Weighted]] = {}
    for product in products:
        a = product.factors[0]
        groups.setdefault((*a.shape[:2], a.dtype, a.device), []).append(product)
    terms = []
    for group in groups.values():
        device = group[0].factors[0].device
        strengths = strengths_on([one.strength for one in group], device)
        flat = [factor for one in group for factor in one.factors]
        # In half precision sums of squares would have about three digits.
        with without_autocast(device):
            # The compiler writes its own backward.
            run = _traced if torch.compiler.is_compiling() else _transformed if in_transform() else _GramPenalty.apply
            terms.append(run(form, dtype or flat[0].dtype, strengths, *flat))
    return terms


class _GramPenalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, dtype: torch.dtype, strengths: Tensor, *factors: Tensor) -> Tensor:
        value, *slopes = _by_product(form, dtype, strengths, factors)
        ctx.form, ctx.dtype = form, dtype
        ctx.save_for_backward(*slopes, strengths, *factors)
        return value

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        slopes: Sequence[Tensor] = ctx.saved_tensors[:2]
        strengths, *factors = ctx.saved_tensors[2:]
        with without_autocast(above.device):
            if torch.is_grad_enabled():
                # A second derivative is asked for, in which Z and W are no constants.
                _, *slopes = _by_product(ctx.form, ctx.dtype, strengths, factors)
            sides = [(slope * above).to(factors[0].dtype) for slope in slopes]
            needed = ctx.needs_input_grad[3:]
            grads = [sides[at % 2][at // 2] @ x if needed[at] else None for at, x in enumerate(factors)]
        return (None, None, None, *grads)


class _InTransforms(torch.autograd.Function):
    """f of the Gram matrices, by its own first derivatives: those of an iteration lose half of the digits when they are
    differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(form: Form, a: Tensor, b: Tensor) -> Tensor:
        return form(a, b)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Form, Tensor, Tensor], output: Tensor) -> None:
        ctx.form = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[None, Tensor, Tensor]:
        # ⟨Z·A, dA⟩ = ⟨½·Z, d(A·Aᵀ)⟩
        _, z, w = ctx.form(*ctx.saved_tensors)
        half = 0.5 * above[..., None, None]
        return None, half * z, half * w

    @staticmethod
    def jvp(ctx: Any, _: None, of_a: Tensor, of_b: Tensor) -> Tensor:
        _, z, w = ctx.form(*ctx.saved_tensors)
        return 0.5 * (z * of_a + w * of_b).sum((-1, -2))


def in_transforms(form: Form, a: Tensor, b: Tensor) -> Tensor:
    """Return f (N,) from Gram matrices (N, d, d), which transforms of torch.func can differentiate again and again."""
    value: Tensor = _InTransforms.apply(form, a, b)
    return value


def _transformed(form: Form, dtype: torch.dtype, strengths: Tensor, *factors: Tensor) -> Tensor:
    a, b = (_grams(factors[side::2], dtype) for side in (0, 1))
    values = in_transforms(form, a.flatten(0, 1), b.flatten(0, 1)).view(a.shape[:2])
    return (values.sum(1) * strengths.to(dtype)).sum().to(factors[0].dtype)


def _traced(form: Form, dtype: torch.dtype, strengths: Tensor, *factors: Tensor) -> Tensor:
    with torch.no_grad():
        value, *slopes = _by_product(form, dtype, strengths, factors)
    # its gradients are strength·Z·A and strength·W·B
    linear = torch.stack(
        [((slopes[at % 2][at // 2].to(x.dtype) @ x.detach()) * x).sum() for at, x in enumerate(factors)]
    ).sum()
    return value + (linear - linear.detach())


def _by_product(
    form: Form, dtype: torch.dtype, strengths: Tensor, factors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of strength·f, 0-d, and strength·Z and strength·W of each product, (products, H, d, d)."""
    a, b = (_grams(factors[side::2], dtype) for side in (0, 1))
    value, z, w = form(a.flatten(0, 1), b.flatten(0, 1))
    strengths = strengths.to(dtype)
    total = (value.view(a.shape[:2]).sum(1) * strengths).sum().to(factors[0].dtype)
    per_matrix = strengths.view(-1, 1, 1, 1)
    return total, z.view_as(a) * per_matrix, w.view_as(a) * per_matrix


def _grams(factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the Gram matrices (products, H, d, d) of factors (H, d, C)."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
        return torch.stack([wide @ wide.mT for wide in (factor.to(dtype) for factor in factors)])
    heads, size = factors[0].shape[:2]
    grams = factors[0].new_empty(len(factors), heads, size, size, dtype=dtype)
    for factor, gram in zip(factors, grams, strict=True):
        wide = factor.to(dtype)
        torch.bmm(wide, wide.mT, out=gram)
    return grams
