"""SpectralCap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.attend.core.method import Method
from headwise.attend.core.method_state import MethodState
from headwise.attend.core.site import Site
from headwise.attend.methods.reparametrization import LAYERS, hold, matrices, refusal, release
from headwise.attend.projections import together
from headwise.attend.projections.block import Block, overwrite_, whole
from headwise.attend.projections.latent import MAKES
from headwise.attend.projections.newton_schulz import cubics
from headwise.numerics.precision import at_least_fp32


class SpectralCap(Method):
    """Cuts the singular values of the q, k, v and o weights at a limit after each step.

    Newhouse et al. 2025, arXiv 2507.13338 (the spectral cap).

    σ_i ← min(σ_i, limit) after the optimizer step, so that no layer stretches its input more than `limit` times;
    smaller singular values keep their bits. The q, k and v blocks of a fused matrix are cut separately, each over all
    of its heads. `of` names the blocks, and `layers="all"` also cuts every other linear layer and convolution of the
    model. The authors' default is 1, and their best language models use 8; they measure in root mean squares, which is
    the same for square matrices. They approximate the cut by odd polynomials. Here it is exact up to rounding in fp32:
    on CPUs by a decomposition of each matrix whose Frobenius norm exceeds the limit, which takes milliseconds for
    hundreds of channels and seconds for many thousands; on CUDA, where a decomposition would synchronise, by two matrix
    signs like theirs in fp64, of all matrices of one shape together, about ninety products of a square matrix with
    itself. There a Frobenius norm of more than a million limits may take several steps. Nothing is
    learned, and the model gets no additional modules.
    """

    limit: float = 1.0
    of: str = "qkvo"
    layers: str = "attention"

    neutral = {"limit": 1e30}
    strong = {"limit": 0.01}

    def check(self) -> None:
        self.require(self.limit > 0, f"limit must be above 0, got {self.limit}")
        known = bool(self.of) and set(self.of) <= set("qkvo") and len(set(self.of)) == len(self.of)
        self.require(
            known, f"of must be one of 'qk', 'vo', 'qkvo' or other letters of these, each once, got {self.of!r}"
        )
        self.choose("layers", *LAYERS)
        self.require(self.layers == "attention" or self.of == "qkvo", 'layers="all" caps every matrix; leave out of=')

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "SpectralCap")

    def build(self, site: Site, state: MethodState) -> None:
        chosen = []
        for module, name, blocks in matrices(site, state, "SpectralCap", self.layers):
            own = [
                block
                for block in blocks
                if self.layers == "all" or set(MAKES.get(block.kind, block.kind)) & set(self.of)
            ]
            chosen += [(module, name, own)] if own else []
        new = hold(state, "SpectralCap", [(module, name, own[0].where) for module, name, own in chosen])
        state.keep("capped", [chosen[index] for index in new])

    def unbuild(self, site: Site, state: MethodState) -> None:
        release(state)

    def after_step(self, site: Site, state: MethodState) -> None:
        self.after_steps([(site, state)])

    @torch.no_grad()
    def after_steps(self, fits: Sequence[tuple[Site, MethodState]]) -> None:
        written: list[tuple[Tensor, Tensor, Tensor]] = []
        stacks: dict[Any, list[tuple[Tensor, Block]]] = {}
        for module, name, blocks in (part for _, state in fits for part in state.kept("capped")):
            parameter = getattr(module, name).detach()
            before = whole(parameter)
            after = before.clone()
            written.append((parameter, before, after))
            for block in blocks:
                rows = _rows(after, block)
                if parameter.device.type in together.TOGETHER_ON:
                    # tall, as the products are of the shorter side
                    shape = tuple(sorted(rows.flatten(1).shape))
                    stacks.setdefault((shape, after.dtype, after.device), []).append((after, block))
                else:
                    _write_(after, block, cut_by_values(rows.flatten(1), self.limit))
        for (shape, *_), members in stacks.items():
            # Stacked in fp64, the matrices of a large model would not fit.
            many = max(1, STACKED // (shape[0] * shape[1]))
            for first in range(0, len(members), many):
                self._cut_together_(members[first : first + many])
        for parameter, before, after in written:
            # On CUDA the comparison would synchronise.
            if parameter.device.type == "cuda" or not torch.equal(after, before):
                overwrite_(parameter, after)

    def _cut_together_(self, members: list[tuple[Tensor, Block]]) -> None:
        """Cut blocks of one shape, some of them perhaps transposed, in place in their weights."""
        matrices = [_rows(weight, block).flatten(1) for weight, block in members]
        wide = [matrix.shape[0] < matrix.shape[1] for matrix in matrices]
        stack = torch.stack([x.mT if flipped else x for x, flipped in zip(matrices, wide, strict=True)])
        cut = cut_by_signs(stack, self.limit).unbind()
        for (weight, block), matrix, flipped in zip(members, cut, wide, strict=True):
            _write_(weight, block, matrix.mT if flipped else matrix)


def _by_rows(weight: Tensor, block: Block) -> Tensor:
    return weight.transpose(0, 1 if block.transposed != (block.kind == "o") else 0)


def _rows(weight: Tensor, block: Block) -> Tensor:
    """Return the rows of a block of a whole weight."""
    return _by_rows(weight, block)[block.rows]


def _write_(weight: Tensor, block: Block, matrix: Tensor) -> None:
    rows = _by_rows(weight, block)
    rows[block.rows] = matrix.reshape(rows[block.rows].shape)


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


# Sides of the limit are told down to a difference of 1e-9 of the norm; directions of singular values above the limit
# are found if the norm is up to a million times the limit.
SIDES, POLAR = cubics(1e-9), cubics(1e-6)
# The largest number of elements of stacked matrices.
STACKED = 1 << 25
