"""What a call shows of a site: its shapes, whether it is causal, and whether it has the heads it was taken to have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.core.method import Method
from headwise.core.site import Site
from headwise.projections.sharded import heads_split


def shapes_of(site: Site, q: Tensor, k: Tensor, hidden: Tensor | None) -> dict[str, Any]:
    """Give the fields of the site that a call's q (B, H, T, D), k (B, Hk, N, D) and hidden (B, T, C) show."""
    seen: dict[str, Any] = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[3]}
    if q.shape[2] != k.shape[2] and not site.is_cross:
        seen["pooled"] = True
    if hidden is not None:
        seen["hidden"] = hidden.shape[-1]
    return seen


def check_heads(site: Site, q: Tensor) -> None:
    """Raise RuntimeError where a call has other heads than the site was taken to have."""
    if site.heads is None or q.shape[1] == site.heads:
        return
    if reason := heads_split(site.module, site.model):
        raise RuntimeError(f"{site.name} is called with {q.shape[1]} of its {site.heads} heads: {reason}")
    raise RuntimeError(
        f"{site.name} was taken to have {site.heads} heads, but its attention was called with q of shape "
        f"{tuple(q.shape)}; pass example=batch to regularize() so that the heads are read off a real call"
    )


def learn_causal(site: Site, methods: list[Method]) -> None:
    """Take note that a layer whose host did not say so is causal; some methods have no meaning there.

    Raises:
        RuntimeError: naming the first of them; the site is as before then.
    """
    site.causal = True
    for method in methods:
        reason = method.refuse(site)
        if reason is not None:
            site.causal = None
            raise RuntimeError(f"{site.name} turned out to be causal: {method!r} {reason}; leave it out with where=")
