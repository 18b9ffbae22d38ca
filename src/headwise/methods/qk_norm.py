"""QKNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.core.method import Method

if TYPE_CHECKING:
    from headwise.core.call import Call
    from headwise.core.site import Site
    from headwise.regularizing.fitted_site import Store

EPS = 1e-6


class QKNorm(Method):
    """Normalises queries and keys of each head to unit root mean square, times a learned gain per head.

    Dehghani et al. 2023, arXiv 2302.05442 (ViT-22B); RMS as in Qwen3 and Gemma 3.

    In training and evaluation. One gain per query head and one per key head, starting at 1; a single number per head, where
    the published ones learn one per channel, so that it gives the same before and after rotary positions, behind which
    it stands. It bounds the logits by scale·D·gain_q·gain_k. Hosts that normalise queries and keys themselves are refused.
    """

    no_neutral = "normalised queries and keys differ from plain ones at any gain"
    acts = "both"
    learns = True
    shapes = ("heads",)

    def refuse(self, site: Site) -> str | None:
        return "the host normalises queries and keys itself" if site.qk_norm else None

    def build(self, site: Site, store: Store) -> None:
        store.parameter("query_gain", torch.ones(site.heads))
        store.parameter("key_gain", torch.ones(site.kv_heads or site.heads))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        store = call.store(self)
        key_gain = store.key_gain.repeat_interleave(call.heads // store.key_gain.shape[0])
        return _normalised(q, store.query_gain), _normalised(k, key_gain), v


def _normalised(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS) * gain.to(x.dtype)[:, None, None]
