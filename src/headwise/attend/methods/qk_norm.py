"""QKNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import normalised
from headwise.attend.core import Call, Method, MethodState, Site

# As in the configurations of Qwen3 and Gemma 3.
EPS = 1e-6


class QKNorm(Method):
    """Normalises each head's queries and keys to unit root mean square, or by a layer norm, times a learned gain per
    head.

    Dehghani et al. 2023, arXiv 2302.05442 (ViT-22B); RMS as in Qwen3 and Gemma 3.

    In training and evaluation. One gain per query head, starting at `start`, and one per key head, starting at 1. The
    published versions learn one gain per channel; here it is one number per head, because the norm acts after rotary
    positions, and so gives the same result as before them. Small language models start it at 1.5 to 4 (pull request
    1125 of openai/parameter-golf, 2026) for sharper maps from the first step. `norm="layer"` subtracts each vector's
    mean first, like ViT-22B's layer norm on queries and keys; this differs before and after rotary positions, so layers
    with rotary positions are refused. It bounds the logits by scale·D·gain_q·gain_k. Hosts that normalise queries and
    keys themselves are refused.
    """

    norm: str = "rms"
    start: float = 1.0

    no_neutral = "normalised queries and keys differ from plain ones at any gain"
    acts = "both"
    learns = True
    shapes = ("heads", "kv_heads")

    def check(self) -> None:
        self.choose("norm", "rms", "layer")
        self.require(self.start > 0, f"start must be above 0, got {self.start}")

    def refuse(self, site: Site) -> str | None:
        if site.rope and self.norm == "layer":
            return 'a layer norm after rotary positions differs from one before them; use norm="rms"'
        return "would act twice: the host normalises queries and keys itself" if site.qk_norm else None

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads and site.kv_heads  # the plan refuses sites without what `shapes` names
        state.parameter("query_gain", torch.full((site.heads,), self.start, dtype=torch.float32))
        state.parameter("key_gain", torch.ones(site.kv_heads, dtype=torch.float32))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        state = call.state(self)
        gains = state.tensor("query_gain"), state.tensor("key_gain")
        return *normalised(q, k, *gains, EPS, self.norm == "layer"), v
