"""DifferentialAttention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.attend.attention.pairs import difference, pair_norm
from headwise.attend.core import Attend, Call, Method, MethodState, Site, random_draws
from headwise.attend.methods.layer_input import JOINT, tokens_of_queries
from headwise.numerics.precision import at_least_fp32

# Epsilon of the root-mean-square norm, as in the authors' code.
EPS = 1e-5

# Standard deviation of the initial vectors of λ.
SPREAD = 0.1

VECTORS = ("query_1", "key_1", "query_2", "key_2")


class DifferentialAttention(Method):
    """Pairs the heads and attends with the weights of the first less a learned multiple of those of the second.

    Ye et al. 2024, arXiv 2410.05258 (Differential Transformer).

    (A₁ - λA₂)·[V₁, V₂] for heads 2j and 2j + 1, the halves of one head of the paper, so that the host keeps its shapes
    and rotary positions; λ = exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2) + start, one per layer. Each pair's output is divided by
    its root mean square and multiplied by a learned gain per channel and by 1 - start. In training and evaluation.
    `start` is a number, or by default 0.8 - 0.6·exp(-0.3·depth) with depth 0 for the first layer. Two maps, no matrix.
    It changes the function of a trained model at once and is intended for training from scratch. Layers with an odd
    number of heads, or of value heads, are refused.

    `version=2` is the authors' second layer (microsoft/unilm, January 2026): (A₁ - σ(x·W)·A₂)·V with one factor per
    query, no norm and no gain. Both query heads of a pair use the key and value head of the pair's first head; if each
    query head has its own, the keys and values of the second are ignored. Both heads of a pair output the same result,
    so the output projection sums two blocks of columns, which are one block in the authors' layer. W starts at 0 and so
    the factor at ½; it needs the layer's input.
    """

    start: float | None = None
    version: int = 1

    no_neutral = "a pair of heads shares one map, whatever λ is"
    acts = "both"
    negative = "makes"
    learns = True
    shapes = ("heads", "kv_heads", "head_dim")
    rowwise = True

    def check(self) -> None:
        self.choose("version", 1, 2)
        self.require(
            self.version == 1 or self.start is None,
            "start belongs to version 1; the second starts its factors at a half",
        )
        number = isinstance(self.start, (int, float)) and not isinstance(self.start, bool)
        self.require(
            self.start is None or (number and 0 <= self.start < 1), f"start must lie in [0, 1), got {self.start!r}"
        )

    def refuse(self, site: Site) -> str | None:
        counts = {"heads": site.heads}
        if self.version == 1:
            counts["heads of keys and values"] = site.kv_heads
        for kind, heads in counts.items():
            if heads is not None and heads % 2:
                return f"pairs heads, and this layer has {heads} {kind}"
        return JOINT if site.joint and self.version == 2 else None

    def build(self, site: Site, state: MethodState) -> None:
        assert (
            site.heads is not None and site.head_dim is not None
        )  # the plan refuses sites without what `shapes` names
        if self.version == 2:
            if site.hidden is None:
                raise ValueError(
                    f"DifferentialAttention(version=2) reads the layer's input, whose size at {site.name} is not "
                    "known; pass example=batch to regularize()"
                )
            state.parameter("factor", torch.zeros(site.heads // 2, site.hidden, dtype=torch.float32))
            return
        for name in VECTORS:
            # Without torch's generators, so that the host's own initial weights do not change.
            key = random_draws.mix("DifferentialAttention", state.seed, site.index, name)
            state.parameter(name, SPREAD * random_draws.normal(key, 0, (site.head_dim,), torch.device("cpu")))
        state.parameter("gain", torch.ones(2 * (site.value_dim or site.head_dim), dtype=torch.float32))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        if self.version == 2:
            first = 2 * (torch.arange(call.heads, device=v.device) // 2)
            return q, k[:, first], v[:, first]
        shared = call.heads // (call.site.kv_heads or call.heads)
        if shared == 1:
            return q, k, v
        # With grouped queries both heads of a pair may share one value head. A pair of the paper has two: here two
        # consecutive value heads of the host.
        pair = torch.arange(call.heads, device=v.device) // 2
        own = 2 * (pair // shared) + torch.arange(call.heads, device=v.device) % 2
        return q, k, v[:, own * shared]

    def weights(self, a: Tensor, call: Call) -> Tensor:
        first, second = a[:, 0::2], a[:, 1::2]
        return (first - self._factor(call).to(a.dtype) * second).repeat_interleave(2, dim=1)

    def attend(self, attend: Attend, call: Call) -> Attend:
        factor = self._factor(call)

        def of_pairs(v: Tensor) -> Tensor:
            # Each head attends to its own values, and to those of the other head of its pair.
            return difference(attend(v), attend(_swapped(v)), factor)

        return of_pairs

    def output(self, o: Tensor, call: Call) -> Tensor:
        if self.version == 2:
            return o
        gain = call.state(self).tensor("gain")
        if gain.shape[0] != 2 * o.shape[-1]:
            raise ValueError(
                f"DifferentialAttention needs values as wide as queries at {call.site.name}, got {o.shape[-1]} and "
                f"{gain.shape[0] // 2} channels: pass example=batch to regularize(), which tells their width, or leave "
                "the layer out with where="
            )
        return pair_norm(o, gain, 1 - self._start(call.site), EPS)

    def _factor(self, call: Call) -> Tensor:
        """Return the factor of the second map: 0-d, or in version 2 one per query, (B, H/2, T, 1)."""
        state = call.state(self)
        if self.version == 2:
            x = tokens_of_queries(self, call)
            return torch.sigmoid(at_least_fp32(F.linear(x, state.tensor("factor").to(x.dtype)))).mT[..., None]
        q1, k1, q2, k2 = (at_least_fp32(state.tensor(name)) for name in VECTORS)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self._start(call.site)

    def _start(self, site: Site) -> float:
        return 0.8 - 0.6 * math.exp(-0.3 * site.depth) if self.start is None else self.start


def _swapped(v: Tensor) -> Tensor:
    """Return the values (B, H, N, D) with the heads of each pair swapped."""
    return v.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)
