"""Attention without the matrix A: the methods' edits of the map v -> A v are collected, then the map is built once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headwise.attention.fused_map import FusedMap
from headwise.attention.matrix_free_readings import MatrixFreeReadings
from headwise.core.call import Call
from headwise.core.method import Method


@dataclass
class Edits:
    """What methods change of one call's map, as far as no matrix is needed for it.

    Attributes:
        q, k: the queries and keys whose products are the logits.
        keep: which keys stay before the softmax, bool, or None where all do.
        kept_after: which keys stay after it with the rest renormalised, which is the same as before it.
        maps: the methods that edit the map itself, in order.
        replaced: whether the first of them stands for the softmax.
    """

    q: Tensor
    k: Tensor
    keep: Tensor | None = None
    kept_after: Tensor | None = None
    maps: list[Method] = field(default_factory=list)
    replaced: bool = False

    @property
    def of_weights(self) -> bool:
        """Return whether anything edits the weights, so that the map is no longer A itself."""
        return bool(self.maps) or self.kept_after is not None

    def all_kept(self) -> Tensor | None:
        """Return the keys that stay in the end."""
        return _both(self.keep, self.kept_after)


def without_matrix(call: Call, active: Sequence[Method]) -> Tensor | None:
    """Compute one call without the matrix, or give None where some method's matrix-free form is not exact here."""
    if call.sinks is not None and not _sinks_are_exact(call):
        return None
    edits = collect(call, active)
    if edits is None:
        return None
    readings = MatrixFreeReadings(call, edits.q, edits.k, edits.keep)
    if any(m.replaces_logits for m in edits.maps) and any(_reads(m) for m in active):
        # The closed forms are those of a softmax.
        return None
    if not read_without_matrix(call, active, readings):
        return None
    made = readings.output()
    if made is not None and not edits.of_weights and call.dropout == 0:
        call.layer.ran.row_statistics = True
        return made
    return _build(call, edits)


def _sinks_are_exact(call: Call) -> bool:
    """Return whether a column without a value is one factor per row here: no kernel drops of it, and the mask learns
    nothing by it."""
    learned = call.mask is not None and call.mask.requires_grad
    return not learned and call.dropout == 0


def collect(call: Call, active: Sequence[Method]) -> Edits | None:
    """Collect what the methods change, or give None where one has no matrix-free form that is exact in this call."""
    edits = Edits(call.q, call.k)
    for method in active:
        if method.overrides("logits"):
            exact = _collect_logits(edits, method, call)
        elif method.overrides("weights"):
            exact = _collect_weights(edits, method, call)
        else:
            continue
        if not exact:
            return None
    return edits


def _collect_logits(edits: Edits, method: Method, call: Call) -> bool:
    if edits.replaced:
        # The map that stands for the softmax knows nothing of further logits.
        return False
    if method.overrides("attend"):
        # A map of its own in the place of the softmax: of the values alone, and of logits that nothing edited before.
        untouched = edits.q is call.q and edits.k is call.k and edits.all_kept() is None and not edits.maps
        edits.replaced = True
        edits.maps.append(method)
        return untouched and (call.dropout == 0 or method.commutes_with_dropout)
    scores = method.scores(edits.q, edits.k, call) if method.overrides("scores") else None
    if scores is not None:
        edits.q, edits.k = scores
        return True
    kept = method.keep(call) if method.overrides("keep") else None
    if kept is not None:
        edits.keep = _both(edits.keep, kept)
    return kept is not None


def _collect_weights(edits: Edits, method: Method, call: Call) -> bool:
    if method.overrides("keep"):
        # Renormalised dropping is a mask only where nothing edited the weights before it.
        edits.kept_after = None if edits.of_weights else method.keep(call)
        return edits.kept_after is not None
    # The kernel's own dropout acts on A, before the edit; in the paper it comes after.
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
    """Let the methods read what they read of A; tell whether all of them could."""
    readers = [m for m in active if _reads(m)]
    # The closed form gives no gradient to a mask, such as a learned bias of positions.
    if readers and call.mask is not None and call.mask.requires_grad:
        return False
    return all(m.overrides("read_free") and m.read_free(readings, call) is not NotImplemented for m in readers)


def _build(call: Call, edits: Edits) -> Tensor | None:
    """Build the edited map and apply it to the values, or give None where an edit is not exact after all."""
    base = FusedMap(call, edits.q, edits.k, edits.all_kept())
    step: Callable[[Tensor], Tensor] = base
    for method in edits.maps:
        edited = method.attend(step, call)
        if edited is None:
            return None
        step = edited
    ran = call.layer.ran
    # Each field is written by its own name: compiled graphs follow no name that is computed.
    if edits.replaced:
        ran.own_map = True
    elif base.width:
        ran.fused_wider = True
    else:
        ran.fused = True
    return step(call.v)
