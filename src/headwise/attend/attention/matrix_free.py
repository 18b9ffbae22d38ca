"""Attention without the matrix A: collects the methods' edits of the map v -> A v, then builds the map once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attend.attention.dropped_elements import attend_dropped
from headwise.attend.attention.edited_logits import attend_edited, edits_run
from headwise.attend.attention.matrix_free_readings import MatrixFreeReadings, sink_share
from headwise.attend.attention.sink_rows import attend_with_sinks
from headwise.attend.attention.softmax import fused, fused_causal, takes_causal_and_mask
from headwise.attend.core import Call, Dropping, LogitEdit, Method


class FusedMap:
    """The map v -> A v computed by the fused kernel, from q, k, the call's mask and the keys to keep."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, keep: Tensor | None) -> None:
        self.q, self.k, self.scale, self.dropout = q, k, call.scale, call.dropout
        self.mask, self.causal, self.width = call.mask, call.causal, 0
        self.sinks, self.columns = call.sinks, None
        # Set by what computes the map of all heads together, in place of this one.
        self.mixed = False
        if keep is None:
            return
        if self.mask is None and not self.causal:
            self.mask = keep
        elif self.mask is None and keep.shape[2] == 1:
            if self._takes_both(call):
                self.columns = torch.zeros(keep.shape, dtype=q.dtype, device=q.device).masked_fill(~keep, float("-inf"))
            else:
                self._widen(keep)
        else:
            # The kernel takes either a mask or causality, so one mask expresses both.
            allowed = call.allowed()
            kept = keep if allowed is None else keep & allowed
            additive = self.mask is not None and self.mask.dtype != torch.bool
            self.mask = self.mask.masked_fill(~kept, float("-inf")) if additive and self.mask is not None else kept
            self.causal = False

    def _takes_both(self, call: Call) -> bool:
        """Return whether torch's private CPU kernel, which takes causality and a mask together, supports the call."""
        plain = call.dropout == 0 and call.sinks is None and call.v.shape[-1] == self.q.shape[-1] and self.q.numel() > 0
        return plain and self.q.device.type == "cpu" and takes_causal_and_mask()

    def _widen(self, keep: Tensor) -> None:
        # Causal with dropped columns: an extra coordinate lowers their logits so far that no T x N mask is needed.
        # Padded to the next multiple of 8, which fast kernels require.
        self.width = 8 - self.q.shape[-1] % 8
        # fp16 ends at 65,504. exp() of either number is 0 in every dtype; with -inf, 0 * inf would give nan.
        far = -6e4 if self.k.dtype == torch.float16 else -1e9
        extra = torch.where(keep[:, :, 0, :, None], 0.0, far).to(self.k.dtype)
        self.k = torch.cat([self.k, F.pad(extra, (0, self.width - 1)).expand(*self.k.shape[:3], self.width)], dim=-1)
        one = torch.ones_like(self.q[..., :1])
        self.q = torch.cat([self.q, F.pad(one, (0, self.width - 1))], dim=-1)

    def __call__(self, v: Tensor) -> Tensor:
        size = v.shape[-1]
        if self.width:
            v = F.pad(v, (0, self.q.shape[-1] - size))
        o = self._fused(v) if self.sinks is None else self._with_sinks(v)
        return o[..., :size] if self.width else o

    def _fused(self, v: Tensor) -> Tensor:
        q, k, scale = self.q, self.k, self.scale
        if self.columns is not None and v.shape[-1] == q.shape[-1]:
            return fused_causal(q, k, v, self.columns, scale)
        if self.columns is not None:
            # That kernel needs values as wide as the queries. Values of several heads side by side are wider, and need
            # a matrix anyway.
            order = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            return fused(q, k, v, attn_mask=(self.columns == 0) & order, scale=scale)
        return fused(q, k, v, attn_mask=self.mask, dropout_p=self.dropout, is_causal=self.causal, scale=scale)

    def _with_sinks(self, v: Tensor) -> Tensor:
        """Return A v with a sink per head: an extra column that takes weight and has no value."""
        assert self.sinks is not None
        return attend_with_sinks(self.q, self.k, v, self.sinks, self.mask, self.causal, self.scale)


class DroppedMap:
    """The map v -> A v whose single weights are dropped by one operator, which draws and forgets them."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, keep: Tensor | None, dropping: Dropping) -> None:
        self.call, self.q, self.k, self.dropping = call, q, k, dropping
        readings = MatrixFreeReadings(call, q, k, keep)
        self.mask, self.causal = readings.mask, readings.causal

    def __call__(self, v: Tensor) -> Tensor:
        d, scale = self.dropping, self.call.scale
        out, lse, _ = attend_dropped(
            self.q, self.k, v, self.mask, self.causal, scale, d.key, d.salt, d.p, d.window, d.renormalize, d.samples
        )
        sinks = self.call.sinks
        return out if sinks is None else out * sink_share(lse, sinks).unsqueeze(-1).to(out.dtype)


# Kernels take values of up to this size; wider ones, of several heads side by side, are cut.
WIDEST = 256


class EditedMap:
    """The map v -> A v whose logits a kernel edits."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, keep: Tensor | None, edit: LogitEdit) -> None:
        self.call, self.q, self.k, self.edit, self.mask = call, q, k, edit, call.mask
        if keep is not None and self.mask is not None and self.mask.dtype != torch.bool:
            self.mask = self.mask.masked_fill(~keep, float("-inf"))
        else:
            # The kernel takes both a mask and causality.
            self.mask = _both(self.mask, keep)

    def __call__(self, v: Tensor) -> Tensor:
        if v.shape[-1] > WIDEST:
            return torch.cat([self(part) for part in v.split(WIDEST, -1)], -1)
        call, edit = self.call, self.edit
        out, lse = attend_edited(self.q, self.k, v, self.mask, call.causal, call.scale, edit.kind, edit.by)
        return out if call.sinks is None else out * sink_share(lse, call.sinks).unsqueeze(-1).to(out.dtype)


@dataclass
class Edits:
    """The methods' matrix-free edits of one call's map.

    Attributes:
        q, k: the queries and keys whose products are the logits.
        keep: which keys stay before the softmax, bool, or None for all.
        kept_after: which keys stay after it, bool, or None for all. As the rest is renormalised, dropping keys after
            the softmax equals dropping them before it.
        edit: the edit of the logits that a kernel applies, or None.
        dropping: the single elements that are dropped, or None.
        dropped_after: whether they are dropped after the softmax.
        maps: the methods that edit the map itself, in order.
        replaced: whether the first of `maps` replaces the softmax.
    """

    q: Tensor
    k: Tensor
    keep: Tensor | None = None
    kept_after: Tensor | None = None
    edit: LogitEdit | None = None
    dropping: Dropping | None = None
    dropped_after: bool = False
    maps: list[Method] = field(default_factory=list)
    replaced: bool = False

    @property
    def of_weights(self) -> bool:
        """Return whether any edit acts on the weights, so that the map is no longer A itself."""
        return bool(self.maps) or self.kept_after is not None or self.dropped_after

    def all_kept(self) -> Tensor | None:
        """Return which keys stay after all edits, bool, or None for all."""
        return _both(self.keep, self.kept_after)


def without_matrix(call: Call, active: Sequence[Method]) -> Tensor | None:
    """Return the output of one call without the matrix, or None if a method's matrix-free form is not exact here."""
    if call.sinks is not None and not _sinks_are_exact(call):
        return None
    edits = collect(call, active)
    if edits is None:
        return None
    if edits.dropping is not None and not _dropping_is_exact(call, active, edits):
        return None
    if edits.edit is not None and edits.edit.kind != "stable" and any(_reads(m) for m in active):
        # Readings know the logits before a kernel edits them.
        return None
    readings = MatrixFreeReadings(call, edits.q, edits.k, edits.keep)
    if any(m.replaces_logits for m in edits.maps) and any(_reads(m) for m in active):
        # The closed-form readings hold for a softmax only.
        return None
    if not read_without_matrix(call, active, readings):
        return None
    # The gradients of rows that were read are added to those of these queries.
    edits.q = readings.q
    out = readings.output()
    if out is not None and not edits.of_weights and edits.edit is None and call.dropout == 0:
        call.layer.ran.row_statistics = True
        return out
    return _build(call, edits)


def _sinks_are_exact(call: Call) -> bool:
    """Return whether a sink is exactly one factor per row: without dropout, and without a mask that gets gradients."""
    learned = call.mask is not None and call.mask.requires_grad
    # The factor needs our operator of row statistics, which ONNX and other runtimes do not have.
    return not learned and call.dropout == 0 and not torch.compiler.is_exporting()


def _dropping_is_exact(call: Call, active: Sequence[Method], edits: Edits) -> bool:
    """Return whether the operator that drops single elements computes this call."""
    assert edits.dropping is not None
    learned = call.mask is not None and call.mask.requires_grad
    # The first key that comes back to a row is the first that the call allows, whatever another method drops.
    alone = not edits.dropping.renormalize or edits.all_kept() is None
    # Readings are of the weights before any edit of them, and after those of the logits.
    unread = edits.dropped_after or not any(_reads(m) for m in active)
    return call.dropout == 0 and not learned and alone and unread


def _takes_edit(call: Call, edits: Edits) -> bool:
    """Return whether a kernel edits logits in this call: no dropout, no learned mask, and nothing else in its place."""
    learned = call.mask is not None and call.mask.requires_grad
    alone = edits.edit is None and edits.dropping is None and call.dropout == 0
    return alone and not learned and edits_run(edits.q, edits.k, call.v)


def collect(call: Call, active: Sequence[Method]) -> Edits | None:
    """Return the methods' edits, or None if a method has no matrix-free form that is exact in this call."""
    edits = Edits(call.q, call.k)
    for method in active:
        if method.overrides("logits"):
            exact = _collect_logits(edits, method, call, active)
        elif method.overrides("weights"):
            exact = _collect_weights(edits, method, call)
        else:
            continue
        if not exact:
            return None
    # Rows that sum to less than 1 are not renormalised to 1: dropping their keys is no mask.
    partial = edits.edit is not None and edits.edit.kind == "pick"
    return None if partial and edits.kept_after is not None else edits


def _alone(method: Method, active: Sequence[Method]) -> bool:
    """Return whether no other method edits logits after this one, or edits or reads weights."""
    # Not by index(): torch.compile cannot compare methods by their fields.
    later = False
    for other in active:
        if other.overrides("weights") or _reads(other) or (later and other.overrides("logits")):
            return False
        later = later or other is method
    return True


def _collect_logits(edits: Edits, method: Method, call: Call, active: Sequence[Method]) -> bool:
    if edits.replaced:
        # A map that replaces the softmax does not use logits.
        return False
    fits = method.overrides("edit") and _takes_edit(call, edits)
    # A kernel edits the products of the final queries and keys. Flash attention takes no values that are narrower than
    # queries and keys, but other methods may need them wider.
    wider = method.overrides("scores") and edits.edit is None and not (fits and _alone(method, active))
    scores = method.scores(edits.q, edits.k, call) if wider else None
    if scores is not None:
        edits.q, edits.k = scores
        return True
    keep = method.keep(call) if method.overrides("keep") else None
    if keep is not None:
        edits.keep = _both(edits.keep, keep)
        return True
    if fits:
        edits.edit = method.edit(call)
        return edits.edit is not None
    if method.overrides("attend"):
        # The map replaces the softmax, so no earlier method may have edited the logits or the map.
        whole = edits.all_kept() is None and edits.dropping is None and edits.edit is None
        untouched = edits.q is call.q and edits.k is call.k and whole and not edits.maps
        edits.replaced = True
        edits.maps.append(method)
        return untouched and (call.dropout == 0 or method.commutes_with_dropout)
    return method.overrides("drop") and _collect_dropping(edits, method, call)


def _collect_dropping(edits: Edits, method: Method, call: Call) -> bool:
    if edits.dropping is None and edits.edit is None:
        edits.dropping = method.drop(call)
        return edits.dropping is not None
    return False


def _collect_weights(edits: Edits, method: Method, call: Call) -> bool:
    if method.overrides("keep") and not edits.of_weights:
        # Dropping with renormalisation equals a mask only if nothing edited the weights before.
        edits.kept_after = method.keep(call)
        if edits.kept_after is not None:
            return True
    if method.overrides("drop") and not edits.maps and not edits.dropped_after:
        edits.dropped_after = _collect_dropping(edits, method, call)
        if edits.dropped_after:
            return True
    # The kernel applies dropout to A before the edit, the textbook form after it.
    if not method.overrides("attend") or (call.dropout > 0 and not method.commutes_with_dropout):
        return False
    edits.maps.append(method)
    return True


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _reads(method: Method) -> bool:
    return method.overrides("read") or method.overrides("read_free")


def read_without_matrix(call: Call, active: Sequence[Method], readings: MatrixFreeReadings) -> bool:
    """Run the methods' matrix-free readings and return whether all of them succeeded."""
    readers = [m for m in active if _reads(m)]
    # The closed form computes no gradient for a mask, such as a learned position bias.
    if readers and call.mask is not None and call.mask.requires_grad:
        return False
    # Two readers might want different statistics, which one pass computes.
    readings.one_reader = len(readers) <= 1
    return all(m.overrides("read_free") and m.read_free(readings, call) is not NotImplemented for m in readers)


def _build(call: Call, edits: Edits) -> Tensor | None:
    """Return the edited map applied to the values, or None if an edit turns out not to be exact."""
    base: FusedMap | DroppedMap | EditedMap
    if edits.edit is not None:
        base = EditedMap(call, edits.q, edits.k, edits.all_kept(), edits.edit)
    elif edits.dropping is None:
        base = FusedMap(call, edits.q, edits.k, edits.all_kept())
    else:
        base = DroppedMap(call, edits.q, edits.k, edits.all_kept(), edits.dropping)
    attend: Callable[[Tensor], Tensor] = base
    for method in edits.maps:
        edited = method.attend(attend, call)
        if edited is None:
            return None
        attend = edited
    # First, as it tells whether the base map or another in its place computed it.
    out = attend(call.v)
    ran = call.layer.ran
    # No setattr with a computed name: torch.compile cannot trace it.
    if edits.replaced:
        ran.own_map = True
    elif isinstance(base, EditedMap):
        ran.edited = True
    elif isinstance(base, DroppedMap):
        ran.dropped = True
    elif base.mixed:
        ran.mixed = True
    elif base.width:
        ran.fused_wider = True
    else:
        ran.fused = True
    return out
