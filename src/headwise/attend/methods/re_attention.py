"""ReAttention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attend.attention.head_mixing import mixed_map, mixes
from headwise.attend.core import Attend, Call, Method, MethodState, Site
from headwise.numerics import masked
from headwise.numerics.precision import at_least_fp32

# Epsilon and momentum of the batch norm, as in torch and the authors' code.
EPS = 1e-5
MOMENTUM = 0.1


class ReAttention(Method):
    """Mixes the attention weights of the heads by a learned matrix and normalises each mixed map.

    Zhou et al. 2021, arXiv 2103.11886 (DeepViT).

    A'_h = norm(Σ_g mix[h, g]·A_g) in training and evaluation; mix starts at the identity. `norm="batch"` is the paper's
    batch norm over samples, queries and keys: with the statistics of the batch in training (under DDP those of each
    process, like torch's batch norm), and with the running ones in evaluation. With `norm="none"` a trained model does
    not change at first. Forbidden entries stay 0 and do not count in the statistics; in the original the norm fills
    them. The host's own dropout of weights acts before the mixing, as in the authors' code. The paper's bias is left
    out, because the norm cancels it. On CUDA, kernels mix strips of the weights in memory of a fixed size, unless the
    host drops weights or the layer has more than 64 heads. Elsewhere it is matrix-free if no batch statistics are
    needed, as Σ_g mix[h, g]·A_g·V_h with one map per head, which is faster only if the matrix is large.
    """

    norm: str = "batch"

    neutral = {"norm": "none"}
    acts = "both"
    negative = "makes"
    learns = True
    rowwise = False
    cost = "edit by each head"
    shapes = ("heads",)

    def check(self) -> None:
        self.choose("norm", "batch", "none")

    def counts_batches(self) -> bool:
        return self.norm == "batch"

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads is not None  # the plan refuses sites without what `shapes` names
        state.parameter("mix", torch.eye(site.heads, dtype=torch.float32))
        if self.norm == "batch":
            state.parameter("gain", torch.ones(site.heads, dtype=torch.float32))
            state.parameter("shift", torch.zeros(site.heads, dtype=torch.float32))
            state.buffer("mean", torch.zeros(site.heads, dtype=torch.float32), saved=True)
            state.buffer("variance", torch.ones(site.heads, dtype=torch.float32), saved=True)

    def weights(self, a: Tensor, call: Call) -> Tensor:
        if call.dropout > 0:
            a = F.dropout(a, call.take_dropout())
        mixed = (self._mix(call, a) @ a.flatten(2)).view(a.shape)
        if self.norm == "none":
            return mixed
        factor, constant = self._affine(call, self._of_batch(mixed, call) if call.training else None)
        normed = mixed * factor.to(a.dtype)[:, None, None] + constant.to(a.dtype)[:, None, None]
        seen = _seen(call)
        return normed if seen is None else normed.masked_fill(~seen, 0.0)

    def attend(self, attend: Attend, call: Call) -> Attend | None:
        if mixes(attend, call):
            return lambda v: self._by_kernels(attend, v, call)
        if self.norm == "batch" and call.training:
            return None

        def mixed(v: Tensor) -> Tensor:
            mix = self._mix(call, v)
            # All maps on the values of one head at a time: concatenated values are too wide for fused kernels.
            own = [torch.einsum("g,bgtd->btd", mix[h], attend(v[:, h : h + 1].expand_as(v))) for h in range(call.heads)]
            o = torch.stack(own, dim=1)
            if self.norm == "none":
                return o
            factor, constant = self._affine(call, None)
            return o * factor.to(v.dtype)[:, None, None] + constant.to(v.dtype)[:, None, None] * _sum_over_seen(v, call)

        return mixed

    def _by_kernels(self, attend: Attend, v: Tensor, call: Call) -> Tensor:
        state = call.state(self)
        norm = fixed = number = count = None
        if self.norm == "batch":
            norm = state.tensor("gain"), state.tensor("shift")
            if call.training:
                number, count = _number_of_entries(call)
            else:
                fixed = torch.stack([state.tensor("mean"), state.tensor("variance")])
        out, table = mixed_map(attend, v, call, state.tensor("mix"), norm, EPS, fixed, number, count)
        if norm is not None and fixed is None:
            self._update_running(call, table[0], table[4])
        return out

    def _mix(self, call: Call, like: Tensor) -> Tensor:
        return call.state(self).tensor("mix").to(like.dtype)

    def _of_batch(self, mixed: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return each head's mean and variance over the entries that count, and update their running means."""
        wide, entries = at_least_fp32(mixed), _counted_entries(call)
        if entries is None:
            count = torch.full((), float(wide[:, 0].numel()), device=wide.device, dtype=torch.float32)
            mean = wide.mean((0, 2, 3))
            spread = (wide - mean[:, None, None]).square().sum((0, 2, 3))
        else:
            weight = entries.expand(wide.shape[0], 1, *wide.shape[2:]).to(wide.dtype)
            count = weight.sum().clamp(min=1)
            mean = (wide * weight).sum((0, 2, 3)) / count
            spread = ((wide - mean[:, None, None]).square() * weight).sum((0, 2, 3))
        self._update_running(call, mean.detach(), (spread / (count - 1).clamp(min=1)).detach())
        return mean, spread / count

    def _update_running(self, call: Call, mean: Tensor, variance: Tensor) -> None:
        # A recompute must not count its batch again.
        again = call.open_pass().again
        if again is True:
            return
        share: Any = MOMENTUM
        if isinstance(again, Tensor):
            share = MOMENTUM * (1 - again.to(mean.dtype).to(mean.device, non_blocking=True))
        state = call.state(self)
        with torch.no_grad():
            for name, new in (("mean", mean), ("variance", variance)):
                running = state.writable(name)
                running.lerp_(new.to(running.dtype), share.to(running.dtype) if isinstance(share, Tensor) else share)

    def _affine(self, call: Call, of_batch: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return the norm as a factor and a constant per head, (H,) in fp32 or wider."""
        state = call.state(self)
        mean, variance = of_batch or (at_least_fp32(state.tensor("mean")), at_least_fp32(state.tensor("variance")))
        factor = at_least_fp32(state.tensor("gain")) * torch.rsqrt(variance + EPS)
        return factor, at_least_fp32(state.tensor("shift")) - factor * mean


def _seen(call: Call) -> Tensor | None:
    """Return which keys each query may see in any head, as mixed maps do, bool (B|1, 1, T|1, N), or None for all."""
    allowed = call.allowed()
    return None if allowed is None else allowed.any(1, keepdim=True)


def _counted_entries(call: Call) -> Tensor | None:
    """Return the entries that count in mean and variance, those of real queries and the keys that they may see.

    bool (B|1, 1, T|1, N), or None for all.
    """
    seen, real = _seen(call), call.real_queries()
    return seen if seen is None or real is None else seen & real[:, None, :, None]


def _number_of_entries(call: Call) -> tuple[float | None, Tensor | None]:
    """Return how many entries of a head count in mean and variance: on the host, or with a mask 0-d, at least 1."""
    if call.mask is None:
        earlier = min(call.queries, call.keys)
        # Query i sees keys 0..i, as far as there are keys.
        of_causal = earlier * (earlier + 1) // 2 + (call.queries - earlier) * call.keys
        return float(call.batch * (of_causal if call.causal else call.queries * call.keys)), None
    entries = _counted_entries(call)
    assert entries is not None
    times = call.batch * call.queries // (entries.shape[0] * entries.shape[2])
    return None, (entries.sum() * times).clamp(min=1)


def _sum_over_seen(v: Tensor, call: Call) -> Tensor:
    """Return the sum of the values (B, H, N, D) over the keys that a query may see, (B, H, T|1, D)."""
    if call.mask is None:
        return call.mean_over_keys(v) * call.allowed_counts().to(v.dtype)
    seen = _seen(call)
    assert seen is not None
    counts = seen.sum(-1, keepdim=True).to(v.dtype)
    return masked.mean_over_allowed(v, seen, call.queries * call.keys) * counts
