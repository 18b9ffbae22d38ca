"""Orthogonal matrices from many matrices at once: Muon's quintic, and the exact polar factor, by batched products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.attend.projections.newton_schulz import cubics

# Jordan et al. 2024: the slope at zero is largest, and singular values end between about 0.7 and 1.2.
QUINTIC, QUINTIC_STEPS = (3.4445, -4.7750, 2.0315), 5
# The least singular value, relative to the Frobenius norm, that the polar factor sets to 1.
POLAR = cubics(1e-5)
# The largest number of elements that are stacked at a time.
STACKED = 1 << 27


def newton_schulz(matrices: Tensor, steps: int = QUINTIC_STEPS) -> Tensor:
    """Return Muon's approximation of UVᵀ of matrices (n, r, C) = USVᵀ with r <= C; zeros stay zero."""
    a, b, c = QUINTIC
    x = _divided(matrices, 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def polar(matrices: Tensor) -> Tensor:
    """Return UVᵀ of matrices (n, r, C) = USVᵀ with r <= C, the nearest matrices with orthonormal rows."""
    x = _divided(matrices, torch.finfo(matrices.dtype).tiny)
    for factor in POLAR:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, gram, x, beta=1.5 * factor, alpha=-0.5 * factor**3)
    return x


def _divided(matrices: Tensor, least: float) -> Tensor:
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    return matrices / norms.clamp(min=least)


def by_shape(compute: Callable[..., Tensor], stacks: Sequence[Tensor], *further: Sequence[Tensor]) -> list[Tensor]:
    """Return `compute` of stacks (n, r, C), called once for all that agree in their sides, dtype and device.

    It is called with the joined stacks and the joined `further` tensors, (n, r, C) or (n, 1, 1). The matrices have r <=
    C there, transposed where they have more rows, and must keep their shape.
    """
    turned = [stack.shape[1] > stack.shape[2] for stack in stacks]
    alike: dict[object, list[int]] = {}
    for at, stack in enumerate(stacks):
        alike.setdefault((frozenset(stack.shape[1:]), stack.dtype, stack.device), []).append(at)
    made: list[Tensor] = list(stacks)
    for places in alike.values():
        given = [_joined([one[at].mT if turned[at] else one[at] for at in places]) for one in (stacks, *further)]
        for at, one in zip(places, compute(*given).split([len(stacks[at]) for at in places]), strict=True):
            made[at] = one.mT if turned[at] else one
    return made


def _joined(stacks: list[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks)


def chunks(sizes: Sequence[int]) -> list[list[int]]:
    """Return the places of sizes in lists, each of which sums to at most `STACKED` or holds one place."""
    made: list[list[int]] = []
    held = 0
    for at, size in enumerate(sizes):
        if not made or held + size > STACKED:
            made.append([])
            held = 0
        made[-1].append(at)
        held += size
    return made
