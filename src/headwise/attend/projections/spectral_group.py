"""The weights of several `Spectral` parametrizations computed together: gamma / sigma·W of all in a few kernels.

A group stacks the blocks of weights that agree in shape into one tensor S (n, R, C). Its vectors are a (n, R) and b
(n, C), the left and right singular vectors or, where outputs are columns of the stored weight, the right and left ones:
sigma is aᵀ·S·b / (‖a‖·‖b‖) either way. The gradient of the weight is gamma / sigma·(G - ⟨G, W⟩ / sigma·abᵀ), that of
gamma ⟨G, W⟩ / sigma.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headwise.attend.projections import together
from headwise.attend.projections.together import Computed, differentiable, matrix_of, parted
from headwise.borders import copy_all_, version_of
from headwise.numerics.kernels import kernels_run_on, operator
from headwise.numerics.operators import without_autocast
from headwise.numerics.precision import at_least_fp32


class Tiling(NamedTuple):
    """How blocks of one size tile a weight: along which axis, how many rows of it each has, and where outputs are.

    `flipped`: whether the axis of the outputs is the second one of a stored block.
    """

    axis: int
    size: int
    blocks: int
    flipped: bool


class SpectralMember(Protocol):
    """What a group needs of a `Spectral` parametrization."""

    gamma: nn.Parameter | None
    tiling: Tiling | None

    def vectors(self, name: str) -> list[Tensor]:
        """Return the left ("u") or right ("v") singular vectors, block by block."""

    def plain_weight(self) -> nn.Parameter | None:
        """Return the parametrized weight if it is a plain parameter on one device."""

    def traced(self, weight: Tensor, gamma: Tensor | None) -> Tensor:
        """Return the reparametrized weight by operators that can be differentiated twice."""


def stacked(weights: Sequence[Tensor], tilings: Sequence[Tiling]) -> Tensor:
    """Return the blocks (n, R, C) of weights; a view if there is one weight."""
    axis, size = tilings[0].axis, tilings[0].size
    matrices = [matrix_of(weight) for weight in weights]
    full = matrices[0] if len(matrices) == 1 else torch.cat(matrices, axis)
    parts = full.unflatten(axis, (-1, size))
    return parts.movedim(1, 0) if axis else parts


def dot_of(stack: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return aᵀ·S·b (n,), differentiable in the stack, and ‖a‖·‖b‖ (n,); sigma is their quotient."""
    wide = at_least_fp32(stack)
    a, b = a.to(wide.dtype), b.to(wide.dtype)
    # A model that was cast to fewer bits has rounded vectors.
    norm = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    return torch.bmm(a.unsqueeze(1), torch.bmm(wide, b.unsqueeze(2))).view(-1), norm


def iterated(stack: Tensor, start: Tensor, flipped: bool) -> tuple[Tensor, Tensor]:
    """Return (a, b) after one power iteration from the right singular vectors, `start`: left, then right.

    These are the vectors b, or a if `flipped`.
    """
    wide = at_least_fp32(stack)
    wide = wide.mT if flipped else wide
    left = _units(torch.bmm(wide, start.to(wide.dtype).unsqueeze(2)).squeeze(2))
    right = _units(torch.bmm(wide.mT, left.unsqueeze(2)).squeeze(2))
    return (right, left) if flipped else (left, right)


def _units(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-12)


class SpectralGroup(NamedTuple):
    """Parametrizations whose weights form one stack."""

    spectrals: Sequence[SpectralMember]
    tilings: Sequence[Tiling]

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return a (n, R) and b (n, C)."""
        u, v, _ = self.read(())
        return (v, u) if self.tilings[0].flipped else (u, v)

    def read(self, gammas: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return u, v and gamma (n,), all from one copy where they have one dtype."""
        us, vs = ([x for s in self.spectrals for x in s.vectors(name)] for name in "uv")
        n, ends = len(us), len(us) * len(us[0])
        if n == 1:
            return us[0].unsqueeze(0), vs[0].unsqueeze(0), gammas[0].detach() if gammas else None
        joined = gammas if gammas and gammas[0].dtype == us[0].dtype else ()
        u, v, gamma = torch.cat([*us, *vs, *joined]).tensor_split((ends, ends + n * len(vs[0])))
        if gammas and not joined:
            gamma = torch.cat(list(gammas))
        return u.view(n, -1), v.view(n, -1), gamma if gammas else None

    def compute(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the reparametrized weights, in the shapes and dtypes of the plain ones."""
        gammas = [s.gamma for s in self.spectrals if s.gamma is not None]
        with without_autocast(weights[0].device):
            made: tuple[Tensor, ...] = _SpectralWeights.apply(self, len(weights), *weights, *gammas)
        return made

    def iterate(self, weights: Sequence[Tensor]) -> None:
        """Run one power iteration on each block and write the vectors."""
        flipped, stack = self.tilings[0].flipped, stacked(weights, self.tilings)
        written = [[x for s in self.spectrals for x in s.vectors(name)] for name in "uv"]
        start = _rows(written[1])
        with without_autocast(stack.device):
            run = power_iteration if stack.device.type == "cuda" else iterated
            a, b = run(stack, start, flipped)
        u, v = (b, a) if flipped else (a, b)
        copy_all_([*written[0], *written[1]], [*u.unbind(), *v.unbind()])

    def counts(self) -> list[int]:
        """Return the number of blocks of each weight."""
        return [tiling.blocks for tiling in self.tilings]


def _rows(vectors: Sequence[Tensor]) -> Tensor:
    return vectors[0].unsqueeze(0) if len(vectors) == 1 else torch.cat(list(vectors)).view(len(vectors), -1)


class _SpectralWeights(torch.autograd.Function):
    """Saves no tensor, as a region under activation checkpointing may compute the weights of all layers in its first
    run and those of its own in its second, and must save as many in both."""

    @staticmethod
    def forward(ctx: Any, group: SpectralGroup, many: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, gammas = tensors[:many], tensors[many:]
        u, v, gamma = group.read(gammas)
        a, b = (v, u) if group.tilings[0].flipped else (u, v)
        stack = stacked(weights, group.tilings)
        if stack.device.type == "cuda":
            flat, sigma, norm = spectral_scale(stack, a, b, gamma, group.tilings[0].axis, group.counts())
            made = parted(flat, weights)
        else:
            sigma, norm = dot_of(stack, a, b)
            ratio = ratio_of(gamma, sigma, norm)
            made, gamma = _scaled(weights, group, ratio), ratio
        if any(ctx.needs_input_grad):
            ctx.group, ctx.tensors, ctx.many = group, tensors, many
            ctx.vectors, ctx.sizes = (a, b), (gamma, sigma, norm)
            # The vectors of a single block are no copy, and `after_step` writes them.
            ctx.versions = [version_of(x) for x in (*tensors, a, b)]
            ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        group, weights, gammas = ctx.group, ctx.tensors[: ctx.many], ctx.tensors[ctx.many :]
        if [version_of(x) for x in (*ctx.tensors, *ctx.vectors)] != ctx.versions:
            raise RuntimeError(
                "a weight, a gamma or a singular vector of a reparametrized layer was changed in place between its "
                "forward and its backward, which needs the value that the forward had: step the optimizer, and call "
                "after_step(), after the backward"
            )
        given = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights, strict=True)]
        if torch.is_grad_enabled():
            # The gammas of the forward: a functional call brings its own, and the modules have theirs again by now.
            own = iter(gammas)
            pairs = zip(group.spectrals, weights, strict=True)
            made = [s.traced(w, None if s.gamma is None else next(own)) for s, w in pairs]
            return (None, None, *differentiable(made, given, ctx.tensors))
        (a, b), (gamma, sigma, norm) = ctx.vectors, ctx.sizes
        stack, above = stacked(weights, group.tilings), stacked(given, group.tilings)
        with without_autocast(stack.device):
            if stack.device.type == "cuda":
                flat, inner = spectral_slopes(
                    above, stack, a, b, gamma, sigma, norm, group.tilings[0].axis, group.counts()
                )
                slopes = parted(flat, weights)
            else:
                # of the form in PyTorch: the ratio, aᵀ·S·b and the norm
                slope, inner = slopes_of(above, stack, a, b, gamma, sigma)
                inner = inner * norm / sigma if gammas else inner
                slopes = parted(_flat(slope, group.tilings[0].axis, group.counts()), weights)
        parts = inner.to(gammas[0].dtype).split(group.counts()) if gammas else ()
        return (None, None, *slopes, *parts)


def ratio_of(gamma: Tensor | None, dot: Tensor, norm: Tensor) -> Tensor:
    """Return gamma / sigma, in the dtype of sigma; exactly 1 for a gamma that was set to sigma."""
    return norm / dot if gamma is None else gamma.to(dot.dtype) / (dot / norm)


def _scaled(weights: Sequence[Tensor], group: SpectralGroup, ratio: Tensor) -> list[Tensor]:
    made = []
    for weight, tiling, part in zip(weights, group.tilings, ratio.split(group.counts()), strict=True):
        shape = [-1, 1] if tiling.axis == 0 else [-1]
        matrix = at_least_fp32(matrix_of(weight)).unflatten(tiling.axis, (-1, tiling.size))
        made.append((matrix * part.view(*shape, 1)).view(weight.shape).to(weight.dtype))
    return made


def slopes_of(above: Tensor, stack: Tensor, a: Tensor, b: Tensor, ratio: Tensor, dot: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the stack (n, R, C), in its dtype, for the gradient `above`, and ⟨G, S⟩ (n,)."""
    g, w = at_least_fp32(above), at_least_fp32(stack)
    inner = (g * w).sum((1, 2))
    outer = a.to(g.dtype) * (inner / dot).unsqueeze(1)
    slope = torch.baddbmm(g, outer.unsqueeze(2), b.to(g.dtype).unsqueeze(1), alpha=-1)
    return slope.mul_(ratio.view(-1, 1, 1)).to(stack.dtype), inner


def _flat(stack: Tensor, axis: int, counts: list[int]) -> Tensor:
    """Return the elements of blocks weight by weight, as the weights store them."""
    if axis == 0:
        return stack.reshape(-1)
    return torch.cat([part.movedim(0, 1).reshape(-1) for part in stack.split(counts)])


def _scale_fake(
    stack: Tensor, a: Tensor, b: Tensor, gamma: Tensor | None, axis: int, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    sigma, norm = (stack.new_empty(len(stack), dtype=wide(stack)) for _ in range(2))
    return stack.new_empty(stack.numel()), sigma, norm


@operator(
    "spectral_scale(Tensor stack, Tensor a, Tensor b, Tensor? gamma, int axis, int[] counts)"
    " -> (Tensor, Tensor, Tensor)",
    _scale_fake,
)
def spectral_scale(
    stack: Tensor, a: Tensor, b: Tensor, gamma: Tensor | None, axis: int, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gamma / sigma·S, flat and in the order of the weights, sigma (n,) and ‖a‖·‖b‖ (n,)."""
    if kernels_run_on(stack.device) and stack.dtype != torch.float64:
        from headwise.attend.projections import triton_spectral

        return triton_spectral.scale(stack, a, b, gamma, axis, counts)
    dot, norm = dot_of(stack, a, b)
    made = (at_least_fp32(stack) * ratio_of(gamma, dot, norm).view(-1, 1, 1)).to(stack.dtype)
    return _flat(made, axis, counts), dot / norm, norm


def _slopes_fake(
    above: Tensor, stack: Tensor, a: Tensor, b: Tensor, gamma: Tensor | None, sigma: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return stack.new_empty(stack.numel()), torch.empty_like(sigma)


@operator(
    "spectral_slopes(Tensor above, Tensor stack, Tensor a, Tensor b, Tensor? gamma, Tensor sigma, Tensor norm,"
    " int axis, int[] counts) -> (Tensor, Tensor)",
    _slopes_fake,
)
def spectral_slopes(
    above: Tensor,
    stack: Tensor,
    a: Tensor,
    b: Tensor,
    gamma: Tensor | None,
    sigma: Tensor,
    norm: Tensor,
    axis: int,
    counts: list[int],
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the weights, flat and in their order, and that of gamma (n,)."""
    if kernels_run_on(stack.device) and stack.dtype != torch.float64:
        from headwise.attend.projections import triton_spectral

        return triton_spectral.slopes(above, stack, a, b, gamma, sigma, norm, axis, counts)
    dot = sigma * norm
    slope, inner = slopes_of(above, stack, a, b, ratio_of(gamma, dot, norm), dot)
    return _flat(slope, axis, counts), inner / sigma


def _iteration_fake(stack: Tensor, start: Tensor, flipped: bool) -> tuple[Tensor, Tensor]:
    n, rows, columns = stack.shape
    return start.new_empty(n, rows), start.new_empty(n, columns)


@operator("spectral_iteration(Tensor stack, Tensor start, bool flipped) -> (Tensor, Tensor)", _iteration_fake)
def power_iteration(stack: Tensor, start: Tensor, flipped: bool) -> tuple[Tensor, Tensor]:
    """Return `iterated`, in the dtype of the start."""
    if kernels_run_on(stack.device) and stack.dtype != torch.float64:
        from headwise.attend.projections import triton_spectral

        return triton_spectral.iteration(stack, start, flipped)
    a, b = iterated(stack, start, flipped)
    return a.to(start.dtype), b.to(start.dtype)


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums of a tensor are kept."""
    return torch.promote_types(x.dtype, torch.float32)


def groups_of(spectrals: Iterable[SpectralMember]) -> list[tuple[SpectralGroup, list[nn.Parameter]]]:
    """Return the parametrizations whose weights can be computed together now, with their weights, by stack."""
    found: dict[Any, tuple[list[SpectralMember], list[Tiling], list[nn.Parameter]]] = {}
    for spectral in spectrals:
        # Vectors lie where their weight does, and are found sooner.
        if spectral.tiling is None or spectral.vectors("u")[0].device.type not in together.TOGETHER_ON:
            continue
        weight = spectral.plain_weight()
        if weight is None or weight.device.type not in together.TOGETHER_ON:
            continue
        matrix, gamma = matrix_of(weight), spectral.gamma
        key = (
            *spectral.tiling[:2],
            spectral.tiling.flipped,
            matrix.shape[1 - spectral.tiling.axis],
            weight.dtype,
            weight.device,
            None if gamma is None else gamma.dtype,
            spectral.vectors("u")[0].dtype,
        )
        parts = found.setdefault(key, ([], [], []))
        parts[0].append(spectral)
        parts[1].append(spectral.tiling)
        parts[2].append(weight)
    return [(SpectralGroup(spectrals, tilings), weights) for spectrals, tilings, weights in found.values()]


def computed_together(spectrals: Iterable[SpectralMember]) -> Iterator[Computed]:
    """Compute the weights of those that can be computed together now."""
    for group, weights in groups_of(spectrals):
        yield group.spectrals, weights, group.compute(weights)  # type: ignore[misc]  # members are modules
