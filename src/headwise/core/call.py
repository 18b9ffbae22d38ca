"""Call: one pass through a site, as methods see it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.core import masked, random_draws
from headwise.core.masked import allowed_keys
from headwise.core.method_state import MethodState
from headwise.core.packed import Packed
from headwise.core.precision import at_least_fp32
from headwise.core.recompute import Pass
from headwise.core.site import Site


@dataclass
class KernelsRan:
    """Which ways of computing attention ran so far.

    Compiled graphs write these fields too. Each stands there from the start and is only ever written by the
    computation: a field that a graph never reads compiles without a guard, while a set that grows would be read, and
    compiled again.
    """

    explicit: bool = False
    fused: bool = False
    fused_wider: bool = False
    row_statistics: bool = False
    own_map: bool = False
    host: bool = False

    def names(self) -> tuple[str, ...]:
        """Return the names that reports show, sorted."""
        shown = {
            "explicit": self.explicit,
            "fused": self.fused,
            "fused, one coordinate wider": self.fused_wider,
            "rows": self.row_statistics,
            "a map of its own": self.own_map,
            "the host's": self.host,
        }
        return tuple(name for name, ran in shown.items() if ran)


class CallLayer(Protocol):
    """What a call asks of the fitted layer that it passes through, which knows methods, as a call does not: their
    stages name it."""

    site: Site
    ran: KernelsRan
    shares_values: bool

    def active(self, training: bool) -> Sequence[Any]:
        """Return the methods that act in this mode, in order."""
        ...

    def state_of(self, method: object) -> MethodState:
        """Return what a method keeps on the layer."""
        ...

    def open_pass(self) -> Pass:
        """Count one pass through the layer, or find the one that it repeats."""
        ...

    def first_values(self, call: Call) -> Tensor | None:
        """Return the values of the stack's first self attention, or None on that layer itself."""
        ...


class Call:
    """One pass through a site: q, k, v, mask, causality, scale, training.

    Attributes:
        q, k, v: (B, H, T, D), (B, H, N, D), (B, H, N, Dv); grouped keys and values are already repeated to H heads.
        mask: bool (True: allowed) or float (added to the logits), broadcastable to (B, H, T, N), or None.
        causal: whether query i sees keys 0..i only, besides the mask.
        scale: factor of the logits.
        dropout: the host's own attention dropout in this call.
        softcap: the host's c of c * tanh(s / c), or None.
        sinks: (H,) logits of a column that takes weight and gives no value, or None.
        hidden: (B, T, C) what entered the layer, where a host tells.
        query_block: the slice of queries in a block, None when all are at hand.
        text: where the tokens of a text stand among queries and keys that are those of an image otherwise, or None.
        is_cross: whether the keys are other tokens than the queries: by the site, or by what the host saw of this call.
        ahead: at the stage `output`, what the method's `ahead` made before attention was computed.
        kernel: the host's own kernel, (q, k, v) -> output (B, H, T, Dv), where it is kept; its logits and weights
            nobody edits.
        packed: how the host's rows hold the samples of this call, where they hold several.
        tokens: which of the tokens that entered the layer are real, bool (B, T), where the host tells it before
            attention.
    """

    def __init__(
        self,
        layer: CallLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        training: bool = False,
        hidden: Tensor | None = None,
        samples: int | None = None,
        cross: bool = False,
        text: slice | None = None,
        kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        packed: Packed | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        self.layer, self.text = layer, text
        self.kernel, self.packed, self.tokens = kernel, packed, tokens
        self.is_cross = cross or layer.site.is_cross
        self.q, self.k, self.v = q, k, v
        self.mask, self.causal, self.dropout = mask, causal, dropout
        # Hosts that say nothing scale by the root of the head size, as torch's kernel does.
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.softcap, self.sinks = softcap, sinks
        self.training, self.hidden = training, hidden
        self.batch, self.heads, self.queries = q.shape[0], q.shape[1], q.shape[2]
        self.keys = k.shape[2]
        # On windowed hosts a batch entry is a window, and a sample has several.
        self.samples = self.batch if samples is None else samples
        self.query_block: slice | None = None
        self.penalties: list[tuple[Tensor, Tensor]] = []
        self.norms: list[tuple[Tensor, Tensor, Tensor]] = []
        self.ahead: Tensor | None = None
        # set on a block of queries: the call it is cut from, and where its queries stand in it if they are no slice
        self.whole: Call | None = None
        self.positions: Tensor | None = None
        self._pass: Pass | None = None
        # None is an answer too ("all keys"): the flag says whether the mask was asked already.
        self._allowed: Tensor | None = None
        self._allowed_known = False

    @property
    def site(self) -> Site:
        """Return the site the call passes through."""
        return self.layer.site

    def open_pass(self) -> Pass:
        """Return the pass this call is, and open it when it is asked for first: opening one counts it."""
        if self._pass is None:
            self._pass = self.layer.open_pass()
        return self._pass

    def value(self, method: object, name: str) -> Tensor:
        """Return the live field `name` as a 0-d fp32 tensor; changing it never recompiles."""
        return self.layer.state_of(method).value(name)

    def state(self, method: object) -> MethodState:
        """Return the method's own parameters on this site."""
        return self.layer.state_of(method)

    def uniform_draw(
        self, method: object, shape: tuple[int, ...], name: str = "", query_dim: int | None = None
    ) -> Tensor:
        """Draw fp32 numbers in [0, 1): the same however often they are asked for in this pass.

        With `query_dim` (the place of the queries, the dimension before the last) a block of queries gets its part of
        the draw.
        """
        if query_dim is not None and query_dim != len(shape) - 2:
            raise ValueError(f"query_dim must be the dimension before the last of {shape}, got {query_dim}")
        block = self.query_block if query_dim is not None else None
        return random_draws.uniform(self.open_pass().key, self.salt(method, name), tuple(shape), self.q.device, block)

    def normal_draw(self, method: object, shape: tuple[int, ...], name: str = "") -> Tensor:
        """Draw fp32 numbers from N(0, 1): the same however often they are asked for in this pass."""
        return random_draws.normal(self.open_pass().key, self.salt(method, name), tuple(shape), self.q.device)

    def salt(self, method: object, name: str) -> int:
        """Return what tells the draws of a method and name from all others of the pass."""
        return self.layer.state_of(method).salt ^ _crc(name)

    def per_sample(self, draw: Tensor) -> Tensor:
        """Repeat a (samples, ...) tensor to (B, ...): on windowed hosts all windows of a sample share its draw."""
        times = self.batch // self.samples
        return draw if times == 1 else draw.repeat_interleave(times, dim=0)

    def take_dropout(self) -> float:
        """Return the host's dropout of weights to a method whose paper drops before it edits; behind the edits none is
        left then."""
        p, self.dropout = self.dropout, 0.0
        return p

    def allowed(self) -> Tensor | None:
        """Return which keys each query may see, bool (B|1, H|1, T|1, N), or None where it may see all.

        An additive mask forbids what it lowers by 9,000 or more.
        """
        if not self._allowed_known:
            at_hand = slice(0, self.queries) if self.query_block is None else self.query_block
            self._allowed = allowed_keys(self.mask, self.causal, at_hand, self.keys, self.q.device)
            self._allowed_known = True
        return self._allowed

    def allowed_counts(self) -> Tensor:
        """Return how many keys each query may see, float (B|1, H|1, T|1, 1), at least 1."""
        allowed = self.allowed()
        if allowed is None:
            return torch.full((1, 1, 1, 1), float(self.keys), device=self.q.device)
        return allowed.sum(-1, keepdim=True).clamp(min=1).float()

    def uniform(self) -> Tensor:
        """Return the uniform weights over allowed keys, (B|1, H|1, T|1, N) in fp32; 0 in a row without any."""
        allowed = self.allowed()
        if allowed is None:
            return torch.full((1, 1, 1, self.keys), 1.0 / self.keys, device=self.q.device)
        return allowed.float() / self.allowed_counts()

    def mean_over_keys(self, v: Tensor) -> Tensor:
        """Return the mean of v (B, H, N, D) over allowed keys, (B, H, T|1, D), without the T x N matrix under
        causality."""
        if self.mask is None and not self.causal:
            return masked.mean_over_all(v, self.keys)
        if self.mask is None:
            return masked.mean_over_earlier(v, self.queries)
        allowed = self.allowed()
        assert allowed is not None
        return masked.mean_over_allowed(v, allowed, self.queries * self.keys)

    def towards_mean(self, out: Tensor, v: Tensor, share: Tensor) -> Tensor:
        """Return (1 - share)·out + share·(mean of v over allowed keys), for out (B, H, T, D), v (B, H, N, D) and a 0-d
        share."""
        earlier = self.causal and self.mask is None and v.shape == out.shape
        plain = v.device.type == "cpu" and v.dtype == out.dtype == share.dtype and not share.requires_grad
        if earlier and plain and not torch.compiler.is_compiling():
            return masked.TowardsEarlier.apply(out, v, share)  # type: ignore[no-untyped-call]  # torch's own is untyped
        return (1 - share) * out + share * self.mean_over_keys(v)

    def real_queries(self) -> Tensor | None:
        """Return which queries are real tokens, bool (B|1, T|1), or None where all are.

        A padded token of a self attention is one that no query may see; on any site, a query without a key is not real.
        """
        if self.packed is not None:
            return self.packed.real
        if self.mask is None:
            return None
        allowed = self.allowed()
        assert allowed is not None
        real = allowed.any(-1).any(1)
        # In a cache's call, or a block's, the keys are other tokens than the queries.
        if not self.is_cross and self.queries == self.keys and self.whole is None:
            real = real & allowed.any(2).any(1)
        return real

    def penalize(self, method: object, value: Tensor, per: str = "query") -> None:
        """Add to the loss: a mean over real queries of (B, H, T) or (B, T), or over samples of (B, ...).

        With `per="query of sample"` each sample's real queries are averaged first, and then the samples: a short one
        counts as much as a long one. The handle's `loss()` divides sums by counts over all processes, so padded and
        unequal shards weigh right.
        """
        value = at_least_fp32(value)
        if per == "sample":
            total, count = value.flatten(1).mean(1).sum() if value.dim() > 1 else value.sum(), value.shape[0]
            # filled on the device: a tensor made of a number here would be copied there, for which the device is waited
            # for
            weight = torch.full((), float(count), device=value.device)
        else:
            value = value.mean(1) if value.dim() == 3 else value
            share = self._shares(value, within_samples=per == "query of sample")
            # Rows of padding may hold anything, nan too.
            total, weight = (value.masked_fill(share == 0, 0.0) * share).sum(), share.sum()
        if (layers := self.layer.state_of(method).layers) > 1:
            total = total / layers
        self.penalties.append((total, weight))

    def penalize_norm(self, method: object, squares: Tensor, count: Tensor, strength: Tensor) -> None:
        """Add to the loss a strength times a norm over the whole batch: the root of a sum of squares (0-d), divided by
        a count.

        A root of sums is no sum of roots: over processes, sums and counts are reduced before the root is taken.
        """
        if (layers := self.layer.state_of(method).layers) > 1:
            strength = strength / layers
        # Cloned, for set() writes the next step's strength into the same tensor before backward may read this one.
        self.norms.append((at_least_fp32(squares), at_least_fp32(count), strength.clone()))

    def _shares(self, value: Tensor, within_samples: bool) -> Tensor:
        """Return the weight of each query in a mean, (B, t); those of the blocks of a call add up to those of the
        whole."""
        real = self.real_queries_at_hand()
        share = torch.ones_like(value) if real is None else real.to(value.dtype).expand_as(value)
        if not within_samples:
            return share
        # A block alone does not know how many real queries its sample has in all.
        whole = self.whole or self
        every = whole.real_queries()
        if every is None or every.shape[1] != whole.queries:
            return share / whole.queries
        return share / every.sum(1, keepdim=True).clamp(min=1)

    def real_queries_at_hand(self) -> Tensor | None:
        """Return which of the queries at hand, a block's or all, are real tokens: bool (B|1, t|1), or None where all
        are."""
        if self.query_block is None:
            return self.real_queries()
        assert self.whole is not None
        whole = self.whole.real_queries()
        return whole if whole is None or whole.shape[1] == 1 else whole[:, self.query_block]

    def query_positions(self) -> Tensor:
        """Return where the queries at hand, a block's or all, stand among the queries of the whole call: int (B|1,
        t)."""
        if self.positions is not None:
            return self.positions
        start = 0 if self.query_block is None else self.query_block.start
        return torch.arange(start, start + self.queries, device=self.q.device)[None]

    def first_values(self) -> Tensor | None:
        """Return the values (B, H, N, Dv) of the stack's first self attention in this forward; None on that site
        itself."""
        return self.layer.first_values(self)

    def block(self, queries: slice) -> Call:
        """Return the call restricted to a block of queries; draws are those of the whole."""
        mask = self.mask
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[..., queries, :]
        part = Call(
            self.layer,
            self.q[:, :, queries],
            self.k,
            self.v,
            mask=mask,
            causal=self.causal,
            scale=self.scale,
            dropout=self.dropout,
            softcap=self.softcap,
            sinks=self.sinks,
            training=self.training,
            hidden=self.hidden,
            samples=self.samples,
            cross=self.is_cross,
        )
        part.query_block, part.whole, part.norms, part._pass = queries, self, self.norms, self._pass
        return part


def _crc(name: str) -> int:
    return zlib.crc32(name.encode())


# zlib cannot be traced; a name is constant in a graph, so its hash is too. This is what
# torch.compiler.assume_constant_result does, which imports the compiler: more than a second of each process.
_crc._dynamo_marked_constant = True  # type: ignore[attr-defined]
