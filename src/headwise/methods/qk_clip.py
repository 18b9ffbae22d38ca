"""QKClip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.largest_logits import largest_logits
from ..method import Method
from ..projections import ProjectionError

if TYPE_CHECKING:
    from ..call import Call
    from ..fitted import Store
    from ..rows import Rows
    from ..site import Site


class QKClip(Method):
    """Shrinks the query and key weights of heads whose largest logit passed a threshold in the step.

    Kimi K2, Moonshot AI 2025, arXiv 2507.20534.

    After the optimizer step: eta = min(1, threshold / S_max) per head, W_q *= eta^balance, W_k *= eta^(1 - balance), biases
    included. S_max is the exact largest scaled logit q·k over allowed keys in the training forwards of the step, on all
    processes, without position biases and before a soft-cap. Under grouped queries the group's largest counts. Hosts that
    normalise queries and keys are refused: their logits do not depend on the size of these weights.
    """

    threshold: float = 100.0
    balance: float = 0.5

    neutral = {"threshold": 1e30}
    strong = {"threshold": 0.01}

    def check(self) -> None:
        self.require(self.threshold > 0, f"threshold must be above 0, got {self.threshold}")
        self.require(0 <= self.balance <= 1, f"balance must lie in [0, 1], got {self.balance}")

    def refuse(self, site: Site) -> str | None:
        if site.qk_norm:
            return "the host normalises queries and keys itself, so that scaling their weights changes nothing"
        try:
            site.projections().need("qk", "QKClip")
        except ProjectionError as error:
            return str(error)
        return None

    def build(self, site: Site, store: Store) -> None:
        query = site.projections().q
        assert query is not None
        device = getattr(query.module, query.name).device
        store.buffer("largest", torch.full((query.heads,), float("-inf"), device=device))

    def read_free(self, rows: Rows, call: Call) -> None:
        mask = rows.mask
        if mask is not None and mask.dtype != torch.bool:
            # A position bias is no part of what the weights can shrink.
            mask = call.allowed()
        seen = call.store(self).largest
        tallest = largest_logits(rows.q, rows.k, mask, rows.causal, call.scale).amax(0)
        # A maximum counts a recomputed layer once, and keeps all passes of an accumulated step.
        seen.copy_(torch.maximum(seen, tallest.to(seen)))

    def after_step(self, site: Site, store: Store) -> None:
        largest = _everywhere(store.largest)
        query, key = site.projections().need("qk", "QKClip")
        groups = largest.view(key.heads, -1).amax(1)
        eta = torch.where(groups > self.threshold, self.threshold / groups, torch.ones_like(groups))
        query.scale_(eta.repeat_interleave(query.heads // key.heads) ** self.balance)
        key.scale_(eta ** (1 - self.balance))
        store.largest.fill_(float("-inf"))


def _everywhere(largest: Tensor) -> Tensor:
    """Give the maximum over all processes."""
    largest = largest.float().clone()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest
