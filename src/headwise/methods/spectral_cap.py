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


class SpectralCap(Method):
    """Cuts the singular values of the q, k, v and o weights at a limit after each step.

    Newhouse et al. 2025, arXiv 2507.13338 (the spectral cap).

    σ_i ← min(σ_i, limit) after the optimizer step, so that no layer stretches its input more than `limit` times; what
    lies below keeps its bits. q, k and v blocks of a fused matrix are cut apart, each over all of its heads. `of` names
    the blocks, and `layers="all"` takes every other linear layer and convolution of the model too. The authors' default
    is 1, their language models that learn best take 8; they count in root mean squares, which is the same for square
    matrices. They come near the cut by odd polynomials; here it is exact, by a decomposition of each matrix whose
    Frobenius norm passes the limit: a matter of milliseconds for hundreds of channels and of seconds for many
    thousands. Nothing is learned and nothing stays in the model.
    """

    limit: float = 1.0
    of: str = "qkvo"
    layers: str = "attention"

    neutral = {"limit": 1e30}
    strong = {"limit": 0.01}
    shapes = ()

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
        for module, name, blocks in matrices(site, "SpectralCap", self.layers):
            own = [
                block
                for block in blocks
                if self.layers == "all" or set(MAKES.get(block.kind, block.kind)) & set(self.of)
            ]
            chosen += [(module, name, own)] if own else []
        held = hold(state, "SpectralCap", [(module, name, own[0].where) for module, name, own in chosen])
        state.keep("capped", [chosen[place] for place in held])

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
            if not torch.equal(after, before):
                overwrite_(parameter, after)

    def _cut_(self, weight: Tensor, block: Block) -> None:
        """Cut the singular values of one block of a whole weight in place."""
        rows = weight.transpose(0, 1 if block.transposed != (block.kind == "o") else 0)
        own = rows[block.rows]
        matrix = at_least_fp32(own.flatten(1))
        # No singular value is above the Frobenius norm, which costs next to nothing.
        if matrix.norm() <= self.limit:
            return
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        if values[0] > self.limit:
            rows[block.rows] = (left * values.clamp(max=self.limit) @ right).view(own.shape).to(weight.dtype)
