"""Call: one pass through a site, as methods see it."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.attend.core import random_draws
from headwise.attend.core.matrix_free_forms import Dropping
from headwise.attend.core.method_state import MethodState
from headwise.attend.core.packed import Packed
from headwise.attend.core.passes import Pass
from headwise.attend.core.site import Site
from headwise.borders import constant_in_graphs
from headwise.numerics import kernels, masked
from headwise.numerics.masked import allowed_keys
from headwise.numerics.precision import at_least_fp32


@dataclass
class KernelsRan:
    """Which kernels have computed on a layer so far: flags for its attention, names for what is around it.

    Compiled graphs write the flags too. They are fixed and the computation never reads them: a field that a graph only
    writes needs no guard, whereas a growing set would be read, and each change would recompile the graph. The names are
    of our other Triton kernels, as their operators have them; what a graph fuses is none of them.
    """

    explicit: bool = False
    fused: bool = False
    fused_wider: bool = False
    row_statistics: bool = False
    own_map: bool = False
    host: bool = False
    draws: bool = False
    dropped: bool = False
    edited: bool = False
    mixed: bool = False
    around: set[str] = field(default_factory=set)

    def names(self) -> tuple[str, ...]:
        """Return the names of the kernels that ran, as reports show them."""
        flags = {
            "explicit": self.explicit,
            "fused": self.fused,
            "fused, one coordinate wider": self.fused_wider,
            "rows": self.row_statistics,
            "dropped elements": self.dropped,
            "edited logits": self.edited,
            "mixed heads": self.mixed,
            "its own map": self.own_map,
            "the host's": self.host,
            "draws": self.draws,
        }
        return (*(name for name, ran in flags.items() if ran), *sorted(self.around))


class CallLayer(Protocol):
    """The part of a fitted layer that a call uses.

    A protocol, because the fitted layer imports `Method`, and the stages of `Method` take a `Call`.
    """

    site: Site
    ran: KernelsRan
    shares_values: bool
    armed: bool

    def active(self, training: bool) -> Sequence[Any]:
        """Return the methods that act in this mode, in order."""
        ...

    def state_of(self, method: object) -> MethodState:
        """Return the method's state on the layer."""
        ...

    def open_pass(self, counted: bool = True) -> Pass:
        """Return a new pass through the layer, or the pass that this one repeats."""
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
        hidden: the layer's input (B, T, C), or None where the host does not provide it.
        query_block: the slice of queries that a block holds; None for a call with all its queries.
        whole: in a block, the call of all queries, whose masks and draws a rowwise method may read; else None.
        text: the slice of text tokens among queries and keys whose other tokens belong to an image, or None.
        is_cross: whether the keys belong to other tokens than the queries, according to the site or to the host.
        ahead: during `output`, the value that the method's `ahead` returned before attention was computed.
        kernel: the host's own kernel, (q, k, v) -> output (B, H, T, Dv), where it is kept; then no method edits logits
            or weights.
        packed: the packing of the samples of this call in the host's rows, where a row holds several samples.
        tokens: bool (B, T), True for real tokens of the layer's input, where the host provides it before attention.
        gates: (B, H, T, 1 or Dv) the sigmoid gates of the output that a method keeps for a watch, or None.
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
        self.batch, self.heads, self.queries, size = q.shape
        self.keys = k.shape[2]
        # The default of torch's kernel.
        self.scale = size**-0.5 if scale is None else scale
        self.softcap, self.sinks = softcap, sinks
        self.training, self.hidden = training, hidden
        # On windowed hosts a batch entry is a window, and a sample has several.
        self.samples = self.batch if samples is None else samples
        self.query_block: slice | None = None
        self.penalties: list[tuple[Tensor, Tensor]] = []
        self.norms: list[tuple[Tensor, Tensor, Tensor]] = []
        self.ahead: Tensor | None = None
        self.gates: Tensor | None = None
        # Set on a block of queries: the call it belongs to, and the positions of its queries if they are not a slice.
        self.whole: Call | None = None
        self.positions: Tensor | None = None
        self._pass: Pass | None = None
        self._draws = False
        # None is a valid mask ("all keys"), so a flag records whether it has been computed.
        self._allowed: Tensor | None = None
        self._allowed_known = False

    @property
    def site(self) -> Site:
        """Return the call's site."""
        return self.layer.site

    def open_pass(self) -> Pass:
        """Return the pass of this call. The first access opens it, which counts it in training."""
        if self._pass is None:
            self._pass = self.layer.open_pass(counted=self.training)
        return self._pass

    def draw_key(self) -> int | Tensor:
        """Return the key of this call's draws. In evaluation only the first access counts the pass."""
        if self.whole is not None:
            # A block of the queries, which may be recomputed.
            return self.whole.draw_key()
        if not self.training and not self._draws:
            self._pass, self._draws = self.layer.open_pass(), True
        return self.open_pass().key

    def value(self, method: object, name: str) -> Tensor:
        """Return the live field `name` as a 0-d fp32 tensor; changing it never recompiles."""
        return self.layer.state_of(method).value(name)

    @property
    def observed(self) -> bool:
        """Return whether a watch reads this call."""
        return self.layer.armed

    def state(self, method: object) -> MethodState:
        """Return the method's own parameters on this site."""
        return self.layer.state_of(method)

    def uniform_draw(
        self, method: object, shape: tuple[int, ...], name: str = "", query_dim: int | None = None
    ) -> Tensor:
        """Return fp32 numbers drawn uniformly from [0, 1); repeated requests in one pass return the same numbers.

        With `query_dim`, the dimension of the queries (always the last but one), the numbers are those of a matrix's
        elements, which are cheaper, and a block of queries gets its part of the draw.
        """
        if query_dim is not None and query_dim != len(shape) - 2:
            raise ValueError(f"query_dim must be the dimension before the last of {shape}, got {query_dim}")
        self._note_kernel()
        key, salt = self.draw_key(), self.salt(method, name)
        if query_dim is None:
            return random_draws.uniform(key, salt, tuple(shape), self.q.device)
        return random_draws.uniform_matrix(key, salt, tuple(shape), self.q.device, self.query_block)

    def kept_draw(self, method: object, shape: tuple[int, ...], p: Tensor, name: str = "") -> Tensor:
        """Return bools that are True with probability 1 - p, 0-d: where `uniform_draw` gives a number of at least p."""
        self._note_kernel()
        return random_draws.kept(self.draw_key(), self.salt(method, name), p, tuple(shape), self.q.device)

    def factor_draw(self, method: object, shape: tuple[int, ...], p: Tensor, name: str = "") -> Tensor:
        """Return fp32 numbers: 1 / (1 - p) where `kept_draw` gives True, and else 0."""
        self._note_kernel()
        return random_draws.factor(self.draw_key(), self.salt(method, name), p, tuple(shape), self.q.device)

    def head_factors(self, method: object, p: Tensor, *, rescale: bool) -> Tensor:
        """Return fp32 factors (samples, heads), 0 with probability p; one head of each sample stays in any case.

        Heads that stay get heads / (number that stays), or 1 without `rescale`.
        """
        self._note_kernel()
        key, salt = self.draw_key(), self.salt(method, "")
        return random_draws.head_factors(key, salt, p, (self.samples, self.heads), self.q.device, rescale)

    def normal_draw(self, method: object, shape: tuple[int, ...], name: str = "") -> Tensor:
        """Return fp32 numbers drawn from N(0, 1); repeated requests in one pass return the same numbers."""
        self._note_kernel()
        return random_draws.normal(self.draw_key(), self.salt(method, name), tuple(shape), self.q.device)

    def noise(self, method: object, x: Tensor, amount: Tensor) -> Tensor:
        """Return amount · `normal_draw` in the shape and dtype of x (B, ...), with amount (B|1, 1, ...) in fp32."""
        self._note_kernel()
        return random_draws.noise(self.draw_key(), self.salt(method, ""), amount, x)

    def dropping(self, method: object, p: Tensor, *, window: int = 1, renormalize: bool) -> Dropping:
        """Return what a method's `drop` returns: the elements whose `uniform_draw` with `query_dim` is below p."""
        key = self.draw_key()
        key = key if isinstance(key, Tensor) else torch.tensor(key)
        return Dropping(key, self.salt(method, ""), p, window, renormalize, self.samples)

    def _note_kernel(self) -> None:
        if not torch.compiler.is_compiling() and kernels.operators_run_on(self.q.device):
            self.layer.ran.draws = True

    def salt(self, method: object, name: str) -> int:
        """Return the salt that separates the draws of a method and name from all others of the pass."""
        return self.layer.state_of(method).salt ^ _crc(name)

    def per_sample(self, draw: Tensor) -> Tensor:
        """Return a (samples, ...) tensor repeated to (B, ...): all windows of a sample share its draw."""
        times = self.batch // self.samples
        return draw if times == 1 else draw.repeat_interleave(times, dim=0)

    def take_dropout(self) -> float:
        """Return the host's attention dropout and set it to 0, for methods whose papers drop weights before editing."""
        p, self.dropout = self.dropout, 0.0
        return p

    def allowed(self) -> Tensor | None:
        """Return which keys each query may see, bool (B|1, H|1, T|1, N), or None where all queries see all keys.

        An additive mask forbids a key where its value is -9,000 or less.
        """
        if not self._allowed_known:
            queries = slice(0, self.queries) if self.query_block is None else self.query_block
            self._allowed = allowed_keys(self.mask, self.causal, queries, self.keys, self.q.device)
            self._allowed_known = True
        return self._allowed

    def allowed_counts(self) -> Tensor:
        """Return the number of keys that each query may see, float (B|1, H|1, T|1, 1), at least 1."""
        if self.mask is None and self.causal:
            # Counted without the T x N matrix of allowed keys.
            return (self.query_positions() + 1).clamp(max=self.keys).float()[:, None, :, None]
        allowed = self.allowed()
        if allowed is None:
            return torch.full((1, 1, 1, 1), float(self.keys), device=self.q.device, dtype=torch.float32)
        return allowed.sum(-1, keepdim=True).clamp(min=1).float()

    def uniform(self) -> Tensor:
        """Return uniform weights over the allowed keys, (B|1, H|1, T|1, N) in fp32; 0 in a row without allowed keys."""
        allowed = self.allowed()
        if allowed is None:
            return torch.full((1, 1, 1, self.keys), 1.0 / self.keys, device=self.q.device, dtype=torch.float32)
        return allowed.float() / self.allowed_counts()

    def mean_over_keys(self, v: Tensor) -> Tensor:
        """Return the mean of v (B, H, N, D) over allowed keys, (B, H, T|1, D).

        Causal calls without a mask need no T x N matrix.
        """
        if self.mask is None and not self.causal:
            return masked.mean_over_all(v, self.keys)
        if self.mask is None:
            return masked.mean_over_earlier(v, self.queries)
        allowed = self.allowed()
        assert allowed is not None
        return masked.mean_over_allowed(v, allowed, self.queries * self.keys)

    def towards_mean(self, out: Tensor, v: Tensor, share: Tensor) -> Tensor:
        """Return (1 - share)·out + share·(mean of v over allowed keys).

        Shapes: out (B, H, T, D), v (B, H, N, D), share 0-d.
        """
        earlier = self.causal and self.mask is None and v.shape == out.shape
        plain = v.device.type == "cpu" and v.dtype == out.dtype == share.dtype and not share.requires_grad
        if earlier and plain and not torch.compiler.is_compiling():
            return masked.TowardsEarlier.apply(out, v, share)  # type: ignore[no-untyped-call]  # torch's own is untyped
        return (1 - share) * out + share * self.mean_over_keys(v)

    def real_queries(self) -> Tensor | None:
        """Return which queries are real tokens, bool (B|1, T|1), or None where all are.

        In self attention a token that no query may see is padding; on any site, so is a query without allowed keys.
        """
        if self.packed is not None:
            return self.packed.real
        if self.mask is None:
            return None
        allowed = self.allowed()
        assert allowed is not None
        real = allowed.any(-1).any(1)
        # With a cache, or in a block, the keys are not the same tokens as the queries.
        if not self.is_cross and self.queries == self.keys and self.whole is None:
            real = real & allowed.any(2).any(1)
        return real

    def penalize(self, method: object, value: Tensor, per: str = "query", times: Tensor | None = None) -> None:
        """Add the mean of `value` to the loss: over real queries of (B, H, T) or (B, T), or over samples of (B, ...).

        With `per="query of sample"` the real queries of each sample are averaged first, then the samples, so that short
        samples count as much as long ones. The handle's `loss()` divides sums by counts over all processes, so that
        padding and unequal shards are weighted correctly. `times` says how many real queries each row stands for where
        only some were read, (B, T), or (T,) in a call that is not a block and whose queries are all real.
        """
        value = at_least_fp32(value)
        if per == "sample":
            total, count = value.flatten(1).mean(1).sum() if value.dim() > 1 else value.sum(), value.shape[0]
            # Filled on the device: copying a host tensor there would wait for the device.
            weight = torch.full((), float(count), device=value.device, dtype=torch.float32)
        else:
            value = value.mean(1) if value.dim() == 3 else value
            if times is None:
                times = self._shares(value, within_samples=per == "query of sample")
            if times is None or times.dim() == 1:
                total = value.sum() if times is None else (value * times).sum()
                weight = torch.full((), float(value.shape[0] * self.queries), device=value.device, dtype=torch.float32)
            else:
                # Padded rows may hold any value, NaN included.
                times = times.expand_as(value)
                total, weight = (value.masked_fill(times == 0, 0.0) * times).sum(), times.sum()
        if (layers := self.layer.state_of(method).layers) > 1:
            total = total / layers
        self.penalties.append((total, weight))

    def penalize_norm(self, method: object, squares: Tensor, count: Tensor, strength: Tensor) -> None:
        """Add strength · √squares / count to the loss, a norm over the whole batch from a 0-d sum of squares.

        Sums and counts are reduced over processes before the root is taken, because a root of sums is not a sum of
        roots.
        """
        if (layers := self.layer.state_of(method).layers) > 1:
            strength = strength / layers
        # Cloned: set() writes the next step's strength into the same tensor, possibly before backward reads it.
        self.norms.append((at_least_fp32(squares), at_least_fp32(count), strength.clone()))

    def _shares(self, value: Tensor, within_samples: bool) -> Tensor | None:
        """Return the weight of each query in a mean, (B, t), or None if all are 1.

        The weights of all blocks add up to those of the call.
        """
        real = self.real_queries_at_hand()
        if real is None and not within_samples:
            return None
        share = torch.ones_like(value) if real is None else real.to(value.dtype).expand_as(value)
        if not within_samples:
            return share
        # A block alone does not know how many real queries its sample has in all.
        whole = self.whole or self
        real = whole.real_queries()
        if real is None or real.shape[1] != whole.queries:
            return share / whole.queries
        return share / real.sum(1, keepdim=True).clamp(min=1)

    def real_queries_at_hand(self) -> Tensor | None:
        """Return which queries of this call or block are real tokens, bool (B|1, t|1), or None where all are."""
        if self.query_block is None:
            return self.real_queries()
        assert self.whole is not None
        whole = self.whole.real_queries()
        return whole if whole is None or whole.shape[1] == 1 else whole[:, self.query_block]

    def query_positions(self) -> Tensor:
        """Return the positions of this block's queries among the queries of the whole call, int (B|1, t)."""
        if self.positions is not None:
            return self.positions
        start = 0 if self.query_block is None else self.query_block.start
        return torch.arange(start, start + self.queries, device=self.q.device)[None]

    def first_values(self) -> Tensor | None:
        """Return the values (B, H, N, Dv) of the stack's first self attention in this forward, or None on that site."""
        return self.layer.first_values(self)

    def at(self, positions: Tensor, q: Tensor) -> Call:
        """Return this whole call with only the queries q at `positions` (B, n); penalties of either are of both."""
        part = copy.copy(self)
        part.q, part.mask = q, masked.mask_at(self.mask, self.causal, positions, self.keys)
        part.queries, part.causal, part.whole, part.positions = positions.shape[1], False, self, positions
        part._allowed_known = False
        return part

    def block(self, queries: slice) -> Call:
        """Return the call restricted to a block of queries; its random draws are part of the whole call's."""
        # The last block of a call may end beyond its queries.
        queries = slice(*queries.indices(self.queries)[:2])
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


# torch.compile cannot trace zlib. A name is constant in a graph, and so is its hash.
@constant_in_graphs
def _crc(name: str) -> int:
    return zlib.crc32(name.encode())
