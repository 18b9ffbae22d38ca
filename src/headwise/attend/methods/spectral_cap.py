"""SpectralCap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attend.core import Method, MethodState, Site
from headwise.attend.methods.reparametrization import LAYERS, hold, matrices, refusal, release
from headwise.attend.projections import together
from headwise.attend.projections.block import Block, overwrite_, whole
from headwise.attend.projections.latent import MAKES
from headwise.attend.projections.spectral_cuts import cut_all_, cut_by_values
from headwise.attend.projections.together import is_plain


class SpectralCap(Method):
    """Cuts the singular values of the q, k, v and o weights at a limit after each step.

    Newhouse et al. 2025, arXiv 2507.13338 (the spectral cap).

    σ_i ← min(σ_i, limit) after the optimizer step, so that no layer stretches its input more than `limit` times;
    smaller singular values keep their bits. The q, k and v blocks of a fused matrix are cut separately, each over all
    of its heads. `of` names the blocks, and `layers="all"` also cuts every other linear layer and convolution of the
    model. The authors' default is 1, and their best language models use 8; they measure in root mean squares, which is
    the same for square matrices. They approximate the cut by odd polynomials. Here it is exact up to rounding in fp32
    on CPUs, by a decomposition of each matrix whose Frobenius norm exceeds the limit, which takes milliseconds for
    hundreds of channels and seconds for many thousands. On CUDA one kernel for the whole model looks in each matrix for
    singular values above the limit, leaves where it finds none, and cuts the others 16 at a time, until none is more
    than 2 % above the limit; a matrix that begins far above may take several steps. Without Triton, and in fp64, two
    matrix signs like theirs in fp64 cut exactly, by some ninety products of each matrix with itself; there a Frobenius
    norm of more than a million limits may take several steps. Nothing is learned, and the model gets no additional
    modules.
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
        matrices: list[Tensor] = []
        copies: list[tuple[Tensor, Block, Tensor]] = []
        gathered: list[tuple[Tensor, Tensor]] = []
        for module, name, blocks in (part for _, state in fits for part in state.kept("capped")):
            parameter = getattr(module, name).detach()
            if parameter.device.type not in together.TOGETHER_ON:
                self._cut_alone_(parameter, blocks)
                continue
            full = parameter
            if not is_plain(parameter):
                full = whole(parameter).clone()
                gathered.append((parameter, full))
            for block in blocks:
                matrix = _rows(full, block).flatten(1)
                matrices.append(matrix)
                # Rows of several places are a copy, and so may kernels of convolutions be.
                if not isinstance(block.rows, slice) or full.dim() > 2:
                    copies.append((full, block, matrix))
        cut_all_(matrices, self.limit)
        for full, block, matrix in copies:
            _write_(full, block, matrix)
        for parameter, full in gathered:
            overwrite_(parameter, full)

    def _cut_alone_(self, parameter: Tensor, blocks: list[Block]) -> None:
        """Cut the blocks of a parameter by decompositions, in place."""
        before = whole(parameter)
        after = before.clone()
        for block in blocks:
            _write_(after, block, cut_by_values(_rows(after, block).flatten(1), self.limit))
        if not torch.equal(after, before):
            overwrite_(parameter, after)


def _by_rows(weight: Tensor, block: Block) -> Tensor:
    return weight.transpose(0, 1 if block.transposed != (block.kind == "o") else 0)


def _rows(weight: Tensor, block: Block) -> Tensor:
    """Return the rows of a block of a whole weight."""
    return _by_rows(weight, block)[block.rows]


def _write_(weight: Tensor, block: Block, matrix: Tensor) -> None:
    rows = _by_rows(weight, block)
    rows[block.rows] = matrix.reshape(rows[block.rows].shape)
