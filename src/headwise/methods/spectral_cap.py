"""SpectralCap."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.precision import at_least_fp32
from headwise.core.site import Site
from headwise.methods.reparametrization import LAYERS, hold, matrices, refusal, release
from headwise.projections.block import Block, overwrite_, whole
from headwise.projections.latent import MAKES
from headwise.projections.newton_schulz import cubics


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
    signs like theirs, of 26 cubics each in fp64, about a hundred products of a square matrix with itself. Nothing is
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

    @torch.no_grad()
    def after_step(self, site: Site, state: MethodState) -> None:
        for module, name, blocks in state.kept("capped"):
            parameter = getattr(module, name).detach()
            before = whole(parameter)
            after = before.clone()
            for block in blocks:
                self._cut_(after, block)
            # On CUDA the comparison would synchronise.
            if parameter.device.type == "cuda" or not torch.equal(after, before):
                overwrite_(parameter, after)

    def _cut_(self, weight: Tensor, block: Block) -> None:
        """Cut the singular values of one block of a whole weight in place."""
        rows = weight.transpose(0, 1 if block.transposed != (block.kind == "o") else 0)
        own = rows[block.rows]
        cut = cut_by_signs if weight.device.type == "cuda" else cut_by_values
        rows[block.rows] = cut(own.flatten(1), self.limit).view(own.shape)


def cut_by_values(matrix: Tensor, limit: float) -> Tensor:
    """Return a matrix with its singular values cut at the limit, or the matrix itself if none is larger."""
    wide = at_least_fp32(matrix)
    # The Frobenius norm, which is cheap, bounds all singular values.
    if wide.norm() <= limit:
        return matrix
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    return (left * values.clamp(max=limit) @ right).to(matrix.dtype) if values[0] > limit else matrix


def cut_by_signs(matrix: Tensor, limit: float) -> Tensor:
    """Return the result of `cut_by_values`, computed by matrix products only, without synchronising the device.

    With the polar decomposition W = UH and the projector P onto the eigenspaces of H above the limit, the cut is
    W - (W - limit U)P; the part of W outside of them does not change. A singular value that P cannot assign to either
    side is so close to the limit that both results agree.
    """
    if matrix.shape[0] < matrix.shape[1]:
        return cut_by_signs(matrix.mT, limit).mT
    wide = matrix.double()
    unit = _sign(wide)
    one = torch.eye(matrix.shape[1], dtype=wide.dtype, device=wide.device)
    above = (one + _sign(unit.mT @ wide - limit * one)) / 2
    cut = wide - (wide - limit * unit) @ above
    return torch.where(above.trace() > 0.5, cut, wide).to(matrix.dtype)


def _sign(matrix: Tensor) -> Tensor:
    """Return a matrix with all singular values above 1e-9 of its Frobenius norm set to 1."""
    matrix = matrix / matrix.norm().clamp(min=torch.finfo(matrix.dtype).tiny)
    for factor in CUBICS:
        matrix = 1.5 * factor * matrix - 0.5 * factor**3 * matrix @ (matrix.mT @ matrix)
    return matrix


CUBICS = cubics(1e-9)
