"""One call through methods without a host: what the twin tests and quick trials use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.computation import attention
from headwise.attention.fitted_layer import FittedLayer
from headwise.core.call import Call
from headwise.core.method import Method
from headwise.core.shared_state import SharedState
from headwise.core.site import Site


def standalone_site(
    q: Tensor, k: Tensor, *, cross: bool = False, hidden: Tensor | None = None, depth: int = 1, layers: int = 2
) -> Site:
    """Describe a site that fits the shapes of q (B, H, T, D) and k (B, Hk, N, D)."""
    site = Site("standalone", nn.Module(), depth=depth, layers=layers, is_cross=cross)
    site.heads, site.kv_heads, site.head_dim = q.shape[1], k.shape[1], q.shape[-1]
    site.hidden = hidden.shape[-1] if hidden is not None else None
    return site


def fit_standalone(
    methods: list[Method], site: Site, *, seed: int = 0, first_values: Tensor | None = None
) -> FittedLayer:
    """Fit methods onto a site that has no host, their parameters built."""
    fitted = FittedLayer(site, methods, SharedState(seed))
    # Without values of a first layer it is the first itself.
    fitted.shares_values = first_values is None
    if first_values is not None:
        fitted.shared.forward.begin(None)
        fitted.running().carried[site.stack] = first_values
    for method, state in zip(methods, fitted.states, strict=True):
        if method.overrides("build"):
            method.build(site, state)
    return fitted


def attend_with(
    methods: list[Method],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str = "fast",
    training: bool = True,
    need_weights: bool = False,
    fitted: FittedLayer | None = None,
    cross: bool = False,
    hidden: Tensor | None = None,
    first_values: Tensor | None = None,
    seed: int = 0,
    whole: int | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Run one call through methods and give the output (B, H, T, Dv) and the sum of their penalties.

    Args:
        form: "fast" or "textbook".
        fitted: from `fit_standalone`, where learned parameters are wanted; its draw counter is set back to 0.
        whole: entries up to which the matrix is made whole and above which in blocks of queries; by default as in a
            model.
        settings: mask, causal, scale, dropout, softcap, sinks, samples, as in `Call`.
    """
    fitted = fitted or fit_standalone(
        methods, standalone_site(q, k, cross=cross, hidden=hidden), seed=seed, first_values=first_values
    )
    fitted.passes.counter.zero_()
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    call = Call(fitted, q, k, v, training=training, hidden=hidden, **settings)
    out, _ = attention(call, fitted.active(training), form=form, need_weights=need_weights, whole=whole)
    parts = [total / weight for total, weight in call.penalties] + [w * s.sqrt() / n for s, n, w in call.norms]
    return out, torch.stack(parts).sum() if parts else torch.zeros(())
