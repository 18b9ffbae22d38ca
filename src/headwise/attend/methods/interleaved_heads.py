"""InterleavedHeads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.attend.core import Method, MethodState, Site, random_draws
from headwise.attend.methods.reparametrization import put_on, refusal, take_off
from headwise.attend.projections.block import Block, along, multiply_
from headwise.numerics.operators import without_autocast
from headwise.numerics.precision import at_least_fp32


class InterleavedHeads(Method):
    """Projects the queries, keys and values of each head by a learned mix of the weights of all heads.

    Interleaved Head Attention: Duvvuri et al. 2026, arXiv 2602.21371, with one pseudo-head for each head.

    W_h ← Σ_g M[h, g]·W_g for queries, keys and, unless `values=False`, values, each with its own M, over key heads
    under grouped queries; in training and evaluation. M is the identity plus a learned matrix that starts at `spread`
    times normal noise: at 0 a trained model does not change at first, and weight decay pulls towards the identity.
    Biases, which each head learns anyway, are not mixed. Because the weights are mixed, it costs nothing per token,
    acts before the host's norms and rotary positions, as in the paper, and folds into plain weights, bit for bit. The
    paper also has several pseudo-heads per head, which have their own maps and make the sequence that many times
    longer; an existing layer cannot be changed in this way, so this is left out. One per head is the form that pull
    request 69 of qlabs-eng/slowrun trained.
    """

    values: bool = True
    spread: float = 0.0

    neutral = {"spread": 0.0}
    strong = {"spread": 0.5}
    acts = "both"
    learns = True
    shapes = ()

    def check(self) -> None:
        self.require(self.spread >= 0, f"spread must be at least 0, got {self.spread}")

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "InterleavedHeads")

    def build(self, site: Site, state: MethodState) -> None:
        kinds = "qkv" if self.values else "qk"

        def make(weight: Tensor, blocks: list[Block]) -> nn.Module | None:
            own = [block for block in blocks if block.kind in kinds]
            starts = {block.kind: self._start(block, site, state) for block in own}
            return Mixed(weight, own, starts) if own else None

        put_on(site, state, "InterleavedHeads", "attention", make)

    def unbuild(self, site: Site, state: MethodState) -> None:
        take_off(state, folded=False)

    def fold(self, site: Site, state: MethodState) -> None:
        take_off(state, folded=True)

    def _start(self, block: Block, site: Site, state: MethodState) -> Tensor:
        key = random_draws.mix("InterleavedHeads", state.seed, site.index, block.kind)
        return self.spread * random_draws.normal(key, 0, (block.heads, block.heads), torch.device("cpu"))


class Mixed(nn.Module):
    """A parametrization that mixes the rows of a weight across the heads of each block; other rows stay.

    Args:
        weight: the parameter.
        blocks: its parts that are mixed.
        starts: for each kind of block, the initial mix minus the identity.
    """

    def __init__(self, weight: Tensor, blocks: list[Block], starts: dict[str, Tensor]) -> None:
        super().__init__()
        self.axis = 1 if blocks[0].transposed else 0
        self.kinds = [block.kind for block in blocks]
        for block in blocks:
            every = torch.arange(weight.shape[self.axis], device=weight.device)
            self.register_buffer(f"rows_{block.kind}", every[block.rows], persistent=False)
            start = starts[block.kind].to(weight.device, torch.promote_types(weight.dtype, torch.float32))
            self.register_parameter(f"off_{block.kind}", nn.Parameter(start))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the mixed weight, in the shape and dtype of the plain one."""
        with without_autocast(weight.device):
            rows = weight.transpose(0, self.axis)
            for kind in self.kinds:
                place = getattr(self, f"rows_{kind}")
                heads = at_least_fp32(rows[place]).unflatten(0, (self._off(kind).shape[0], -1))
                # The identity is added separately, so that unmixed heads keep their bits.
                mixed = heads + torch.tensordot(self._off(kind).to(heads.dtype), heads, dims=1)
                rows = rows.index_copy(0, place, mixed.flatten(0, 1).to(rows.dtype))
            return rows.transpose(0, self.axis)

    @torch.no_grad()
    def rescale_(self, weight: Tensor, factors: Tensor, axis: int) -> None:
        """Multiply the computed weight by factors along an axis: output rows through the mix, inputs in `weight`.

        Raises:
            RuntimeError: if the output rows of one head have several factors.
        """
        if axis != self.axis:
            multiply_(weight, along(factors, axis, weight))
            return
        for kind in self.kinds:
            off = self._off(kind)
            by_row = factors[getattr(self, f"rows_{kind}")].unflatten(0, (off.shape[0], -1))
            if not (by_row == by_row[:, :1]).all():
                raise RuntimeError(
                    "rows of one head cannot be scaled separately while heads are mixed: fold or remove "
                    "InterleavedHeads first"
                )
            by_head, eye = by_row[:, :1].to(off), torch.eye(off.shape[0], dtype=off.dtype, device=off.device)
            off.copy_(by_head * (eye + off) - eye)

    def _off(self, kind: str) -> nn.Parameter:
        off: nn.Parameter = getattr(self, f"off_{kind}")
        return off
