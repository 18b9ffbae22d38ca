"""InterleavedHeads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.core import random_draws
from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.precision import at_least_fp32
from headwise.core.site import Site
from headwise.methods.reparametrization import put_on, refusal, take_off
from headwise.projections.block import Block, multiply_


class InterleavedHeads(Method):
    """Projects the queries, keys and values of each head by a learned mix of the weights of all heads.

    Interleaved Head Attention: Duvvuri et al. 2026, arXiv 2602.21371, with one pseudo-head for each head.

    W_h ← Σ_g M[h, g]·W_g for queries, keys and, unless `values=False`, values, each with an M of its own, over key
    heads under grouped queries; in training and evaluation. M is the identity plus a learned matrix, which starts at
    `spread` times normal noise: at 0 a trained model does not change, and weight decay pulls towards the identity.
    Biases, free in each head anyway, stay. Mixed in the weights, it costs nothing by token, stands before the host's
    norms and rotary positions, as in the paper, and folds into plain weights, bit for bit. The paper's several
    pseudo-heads for each head, which make the sequence as many times longer and have maps of their own, are no edit of
    a layer that exists and are left out; with one, it is the form that pull request 69 of qlabs-eng/slowrun trained
    with.
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
    """Computes a weight whose rows of each head are a mix of those of all heads of its block; other rows stay.

    Args:
        weight: the parameter.
        blocks: its parts that are mixed.
        starts: of each kind of block, what its mix is beside the identity at first.
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
        with torch.autocast(weight.device.type, enabled=False):
            rows = weight.transpose(0, self.axis)
            for kind in self.kinds:
                place = getattr(self, f"rows_{kind}")
                heads = at_least_fp32(rows[place]).unflatten(0, (self._off(kind).shape[0], -1))
                # Beside the identity, so that what is not mixed keeps its bits.
                mixed = heads + torch.tensordot(self._off(kind).to(heads.dtype), heads, dims=1)
                rows = rows.index_copy(0, place, mixed.flatten(0, 1).to(rows.dtype))
            return rows.transpose(0, self.axis)

    @torch.no_grad()
    def rescale_(self, weight: Tensor, factors: Tensor, axis: int) -> None:
        """Multiply rows of what is computed by factors, alike within a head, which the mix takes; along the inputs, the
        weight does.

        Raises:
            RuntimeError: where the rows of one head have several factors.
        """
        if axis != self.axis:
            shape = [1] * weight.dim()
            shape[axis] = -1
            multiply_(weight, factors.view(shape))
            return
        for kind in self.kinds:
            off = self._off(kind)
            of_heads = factors[getattr(self, f"rows_{kind}")].unflatten(0, (off.shape[0], -1))
            if not (of_heads == of_heads[:, :1]).all():
                raise RuntimeError(
                    "rows of one head cannot be scaled apart while heads are mixed: fold or remove InterleavedHeads "
                    "first"
                )
            by_head, eye = of_heads[:, :1].to(off), torch.eye(off.shape[0], dtype=off.dtype, device=off.device)
            off.copy_(by_head * (eye + off) - eye)

    def _off(self, kind: str) -> nn.Parameter:
        off: nn.Parameter = getattr(self, f"off_{kind}")
        return off
