"""The weights gain·v / ‖v‖ of several layers computed together, v an output row: all of a model in a few kernels.

A group stacks the rows of weights that agree in the number of inputs into one matrix S (N, C). With G the gradient of
a row, its gain's is ⟨G, v⟩ / ‖v‖, and that of v gain / ‖v‖·(G - ⟨G, v⟩ / ‖v‖²·v).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from headwise.attend.projections import together
from headwise.attend.projections.together import Computed, differentiable, matrix_of, parted, plain_original
from headwise.borders import version_of
from headwise.numerics.kernels import kernels_run_on, operator
from headwise.numerics.operators import without_autocast
from headwise.numerics.precision import at_least_fp32


class RowMember(Protocol):
    """What a group needs of a parametrization."""

    gain: nn.Parameter
    axis: int

    def traced(self, weight: Tensor, gain: Tensor) -> Tensor:
        """Return the reparametrized weight by operators that can be differentiated twice."""


class RowGroup(NamedTuple):
    """Parametrizations whose rows form one stack; all have their outputs along `axis` of the weight."""

    members: Sequence[RowMember]
    axis: int

    def compute(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the reparametrized weights, in the shapes and dtypes of the plain ones."""
        gains = [member.gain for member in self.members]
        with without_autocast(weights[0].device):
            made: tuple[Tensor, ...] = _RowWeights.apply(self, len(weights), *weights, *gains)
        return made


def stacked(weights: Sequence[Tensor], axis: int) -> Tensor:
    """Return the rows (N, C) of weights; a view if there is one weight."""
    matrices = [matrix_of(weight) for weight in weights]
    full = matrices[0] if len(matrices) == 1 else torch.cat(matrices, axis)
    return full if axis == 0 else full.t()


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    return vectors[0].detach() if len(vectors) == 1 else torch.cat(list(vectors))


class _RowWeights(torch.autograd.Function):
    """Saves no tensor, as that of `spectral_group`."""

    @staticmethod
    def forward(ctx: Any, group: RowGroup, many: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, gains = tensors[:many], tensors[many:]
        gain = _joined(gains)
        flat = scaled_rows(stacked(weights, group.axis), gain, group.axis, [len(x) for x in gains])
        if any(ctx.needs_input_grad):
            ctx.group, ctx.tensors, ctx.many, ctx.gain = group, tensors, many, gain
            ctx.versions = [version_of(x) for x in tensors]
            ctx.set_materialize_grads(False)
        return tuple(parted(flat, weights))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        group, weights, gains = ctx.group, ctx.tensors[: ctx.many], ctx.tensors[ctx.many :]
        if [version_of(x) for x in ctx.tensors] != ctx.versions:
            raise RuntimeError(
                "a weight or a gain of a reparametrized layer was changed in place between its forward and its "
                "backward, which needs the value that the forward had: step the optimizer after the backward"
            )
        given = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights, strict=True)]
        if torch.is_grad_enabled():
            # The gains of the forward: a functional call brings its own, and the modules have theirs again by now.
            made = [m.traced(w, gain) for m, w, gain in zip(group.members, weights, gains, strict=True)]
            return (None, None, *differentiable(made, given, ctx.tensors))
        counts = [len(x) for x in gains]
        with without_autocast(weights[0].device):
            flat, slopes = row_slopes(
                stacked(given, group.axis), stacked(weights, group.axis), ctx.gain, group.axis, counts
            )
        return (None, None, *parted(flat, weights), *slopes.split(counts))


def _flat(stack: Tensor, axis: int, counts: list[int]) -> Tensor:
    """Return the elements of rows weight by weight, as the weights store them."""
    if axis == 0:
        return stack.reshape(-1)
    return torch.cat([part.t().reshape(-1) for part in stack.split(counts)])


def _scaled_fake(stack: Tensor, gain: Tensor, axis: int, counts: list[int]) -> Tensor:
    return stack.new_empty(stack.numel())


@operator("scaled_rows(Tensor stack, Tensor gain, int axis, int[] counts) -> Tensor", _scaled_fake)
def scaled_rows(stack: Tensor, gain: Tensor, axis: int, counts: list[int]) -> Tensor:
    """Return gain·v / ‖v‖ of each row, flat and in the order of the weights, which have so many rows each."""
    if kernels_run_on(stack.device) and stack.dtype != torch.float64:
        from headwise.attend.projections import triton_weight_rows

        return triton_weight_rows.scaled(stack, gain, axis, counts)
    wide = at_least_fp32(stack)
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return _flat((wide * (gain.to(wide.dtype).unsqueeze(1) / norms)).to(stack.dtype), axis, counts)


def _slopes_fake(above: Tensor, stack: Tensor, gain: Tensor, axis: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    return stack.new_empty(stack.numel()), torch.empty_like(gain)


@operator(
    "row_slopes(Tensor above, Tensor stack, Tensor gain, int axis, int[] counts) -> (Tensor, Tensor)", _slopes_fake
)
def row_slopes(above: Tensor, stack: Tensor, gain: Tensor, axis: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return the gradient of the weights, flat and in their order, and that of the gains (N,)."""
    if kernels_run_on(stack.device) and stack.dtype != torch.float64:
        from headwise.attend.projections import triton_weight_rows

        return triton_weight_rows.slopes(above, stack, gain, axis, counts)
    g, v = at_least_fp32(above), at_least_fp32(stack)
    norms = torch.linalg.vector_norm(v, dim=1)
    inner = (g * v).sum(1) / norms
    ratio = gain.to(norms.dtype) / norms
    slope = ratio.unsqueeze(1) * (g - (inner / norms).unsqueeze(1) * v)
    return _flat(slope.to(stack.dtype), axis, counts), inner.to(gain.dtype)


def computed_together(pairs: Iterable[tuple[RowMember, nn.Module]]) -> Iterator[Computed]:
    """Compute the weights of those that can be computed together now; pairs of them and the lists that hold them."""
    found: dict[Any, tuple[list[RowMember], list[nn.Parameter]]] = {}
    for member, chain in pairs:
        weight = plain_original(chain)
        if weight is None or weight.device.type not in together.TOGETHER_ON or (member.axis and weight.dim() > 2):
            continue
        inputs = weight.numel() // weight.shape[member.axis]
        parts = found.setdefault((member.axis, inputs, weight.dtype, weight.device, member.gain.dtype), ([], []))
        parts[0].append(member)
        parts[1].append(weight)
    for (axis, *_), (members, weights) in found.items():
        yield cast(list[nn.Module], members), weights, RowGroup(members, axis).compute(weights)
