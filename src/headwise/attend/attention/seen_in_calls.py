"""The sizes, heads and causality of a site that a call shows, and whether the methods apply to such a site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headwise.attend.core import Method, Site
from headwise.attend.projections.sharded import heads_split


def shapes_seen(site: Site, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> dict[str, Any]:
    """Return the fields of the site that follow from a call's q (B, H, T, D), k (B, Hk, N, D), v (B, Hk, N, Dv) and
    hidden (B, T, C)."""
    seen: dict[str, Any] = {"heads": q.shape[1], "head_dim": q.shape[3], "value_dim": v.shape[3]}
    # A layer may repeat grouped keys itself: what its weights tell is the same in every call.
    if site.kv_heads is None or k.shape[1] % site.kv_heads:
        seen["kv_heads"] = k.shape[1]
    if q.shape[2] != k.shape[2] and not site.is_cross:
        seen["pooled"] = True
    if hidden is not None:
        seen["hidden"] = hidden.shape[-1]
    return seen


def order_of(q: Tensor) -> tuple[int, bool]:
    """Return the rows of q (B, H, T, D) and whether its tokens lie farther apart than its rows.

    Projections of (T, B, C) are views of this kind, or come from elementwise operations, which keep the order. Strides
    of 0 are of learned queries that all samples share.
    """
    rows, _, tokens, _ = q.stride()
    return q.shape[0], 0 < rows < tokens


def leaves_time_first(site: Site, y: Tensor, rows: int, farther: bool, queries: int) -> bool:
    """Return whether the branch y of a layer is (T, B, C), as in fairseq, by the (B, T) of the call that made it.

    Where there are as many tokens as samples, only `farther`, the order in memory, tells (see `order_of`).

    Raises:
        RuntimeError: if y may as well be (B, T, C) in windows of as many tokens as the batch has samples.
    """
    if y.dim() != 3 or y.shape[:2] != (queries, rows) or site.windowed or site.pooled:
        return False
    if rows == queries:
        return farther
    if site.row_order == "" and rows % queries == 0:
        raise RuntimeError(
            f"{site.name} returns {tuple(y.shape)} from {rows} rows of {queries} queries: either tokens come before "
            "samples, or it attends in windows; pass example=batch (with two or more different samples) to "
            "regularize(), so that the order is seen, or leave the layer out with where="
        )
    return True


def check_heads(site: Site, methods: Sequence[Method], q: Tensor, bare: bool, armed: bool) -> None:
    """Raise RuntimeError if a call does not have the expected number of heads.

    Args:
        site: the layer.
        methods: those that act there.
        q: the call's queries, (B, H, T, D).
        bare: whether the layer has no handle: then it is a watch's.
        armed: whether the watch reads this call.
    """
    if site.heads is None and q.shape[1] == 1:
        _check_one_head(site, methods)
    if site.heads is None or q.shape[1] == site.heads or (bare and not armed):
        return
    if reason := heads_split(site.module, site.model):
        raise RuntimeError(f"{site.name} is called with {q.shape[1]} of its {site.heads} heads: {reason}")
    if not bare:
        raise RuntimeError(
            f"{site.name} was taken to have {site.heads} heads, but its attention was called with q of shape "
            f"{tuple(q.shape)}; pass example=batch to regularize() so that the heads are read from a real call"
        )


def _check_one_head(site: Site, methods: Sequence[Method]) -> None:
    """Raise RuntimeError if a layer turns out to have one head and a method does not apply to it."""
    site.heads = 1
    reasons = [(method, method.refuse(site)) for method in methods]
    # Still unknown: a later call may have more heads.
    site.heads = None
    for method, reason in reasons:
        if reason is not None:
            raise RuntimeError(
                f"{site.name} turned out to have one head: {method!r} {reason}; pass example=batch to "
                "regularize(), which leaves such layers out, or leave it out with where="
            )


def learn_causal(site: Site, methods: Sequence[Method]) -> None:
    """Record that a site is causal, and raise RuntimeError if a method does not apply to causal sites."""
    site.causal = True
    for method in methods:
        reason = method.refuse(site)
        if reason is not None:
            site.causal = None
            raise RuntimeError(f"{site.name} turned out to be causal: {method!r} {reason}; leave it out with where=")
