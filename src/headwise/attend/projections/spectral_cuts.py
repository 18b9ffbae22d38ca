"""Singular values cut at a limit: by a decomposition, by products, or by a kernel for all matrices at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attend.projections.newton_schulz import cubics
from headwise.numerics.kernels import ROW_DTYPES, kernels_run_on, operator
from headwise.numerics.precision import at_least_fp32

# Sides of the limit are told down to a difference of 1e-9 of the norm; directions of singular values above the limit
# are found if the norm is up to a million times the limit.
SIDES, POLAR = cubics(1e-9), cubics(1e-6)
# The largest number of elements of stacked matrices, and of copies in fp32 for the kernel.
STACKED, COPIED = 1 << 25, 1 << 27


def cut_by_values(matrix: Tensor, limit: float) -> Tensor:
    """Return a matrix with its singular values cut at the limit, or the matrix itself if none is larger."""
    wide = at_least_fp32(matrix)
    # The Frobenius norm, which is cheap, bounds all singular values.
    if wide.norm() <= limit:
        return matrix
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    return (left * values.clamp(max=limit) @ right).to(matrix.dtype) if values[0] > limit else matrix


def cut_by_signs(matrices: Tensor, limit: float) -> Tensor:
    """Return `cut_by_values` of matrices (n, R, C), computed by matrix products only, without synchronising the
    device.

    With the polar decomposition W = UH and the projector P onto the eigenspaces of H above the limit, the cut is
    W - (W - limit U)P; the part of W outside of them does not change. A singular value that P cannot assign to either
    side is so close to the limit that both results agree. Where U has not converged, H is too small, which changes
    nothing below the limit: U serves for singular values above the limit alone.
    """
    if matrices.shape[-2] < matrices.shape[-1]:
        return cut_by_signs(matrices.mT, limit).mT
    wide = matrices.double()
    unit = _sign(wide, POLAR)
    one = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    above = (one + _sign(torch.bmm(unit.mT, wide) - limit * one, SIDES)) / 2
    cut = torch.baddbmm(wide, wide - limit * unit, above, alpha=-1)
    some = above.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] > 0.5
    return torch.where(some, cut, wide).to(matrices.dtype)


def _sign(matrices: Tensor, factors: Sequence[float]) -> Tensor:
    """Return matrices (n, R, C) with the singular values in the cubics' range, relative to the norm, set to 1."""
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    matrices = matrices / norms.clamp(min=torch.finfo(matrices.dtype).tiny)
    for factor in factors:
        gram = torch.bmm(matrices.mT, matrices)
        matrices = torch.baddbmm(matrices, matrices, gram, beta=1.5 * factor, alpha=-0.5 * factor**3)
    return matrices


def cut_all_(matrices: Sequence[Tensor], limit: float) -> None:
    """Cut matrices, which may be parts of weights, in place and without waiting for the device.

    On CUDA the kernel cuts those of fp32, fp16 and bf16, all of a dtype in one launch. It leaves no singular value more
    than 2 % above the limit, but with a probability of some 1e-10 for each, or where the matrix begins so far above
    that a call ends before: it takes 16 singular values at a time down by a factor of up to 0.7, 16 times as often as
    that takes to meet all. Elsewhere `cut_by_signs` cuts stacks of one shape, exact up to rounding.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for matrix in matrices:
        groups.setdefault((matrix.dtype, matrix.device), []).append(matrix)
    for (dtype, _), members in groups.items():
        # The kernel works on copies in fp32 of matrices of half precision.
        full = sum(x.numel() for x in members) if dtype != torch.float32 else 0
        each = max(1, len(members) * COPIED // max(1, full)) if full > COPIED else len(members)
        for first in range(0, len(members), each):
            cut_singular_values(members[first : first + each], limit)


def _cut_fake(matrices: list[Tensor], limit: float) -> None:
    return None


@operator("cut_singular_values(Tensor(a!)[] matrices, float limit) -> ()", _cut_fake)
def cut_singular_values(matrices: list[Tensor], limit: float) -> None:
    """Cut matrices of one dtype and device in place."""
    if not kernels_run_on(matrices[0].device) or matrices[0].dtype not in ROW_DTYPES:
        return _cut_stacks_(matrices, limit)
    from headwise.attend.projections import triton_cap

    # The kernel reads rows without gaps between their numbers; a matrix and its transpose have the same values.
    rows = [x if x.stride(1) == 1 else x.mT if x.stride(0) == 1 else x.contiguous() for x in matrices]
    triton_cap.cap(rows, limit)
    torch.autograd.graph.increment_version(matrices)
    for matrix, row in zip(matrices, rows, strict=True):
        if 1 not in matrix.stride():
            matrix.copy_(row)
    return None


def _cut_stacks_(matrices: Sequence[Tensor], limit: float) -> None:
    """Cut matrices in place, those of one shape together."""
    stacks: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices:
        # tall, as the products are of the shorter side
        tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
        stacks.setdefault(tuple(tall.shape), []).append(tall)
    for (rows, columns), members in stacks.items():
        # Stacked in fp64, the matrices of a large model would not fit.
        many = max(1, STACKED // (rows * columns))
        for first in range(0, len(members), many):
            part = members[first : first + many]
            for matrix, cut in zip(part, cut_by_signs(torch.stack(part), limit).unbind(), strict=True):
                matrix.copy_(cut)
