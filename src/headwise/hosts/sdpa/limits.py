"""Refusals of calls that the methods on their site do not support, checked when the call is made."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from torch import Tensor

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.method import Method
from headwise.core.site import Site
from headwise.files.errors import LEAVE_OUT
from headwise.hosts.layers.residual import refusal
from headwise.hosts.sdpa.shape import EXAMPLE, FOLDED, OWN, SAMPLE_MAJOR, UNCLEAR, WINDOW_MAJOR, Served, Shape, batch


class Limits:
    """The reasons why methods on a site refuse calls that are causal, pooled, windowed or of unknown row order.

    Properties that the module does not declare show only in its calls; the reasons are computed once, at fitting.
    """

    def __init__(self, fitted: FittedLayer) -> None:
        site, methods = fitted.site, fitted.methods
        self.causal = _first_refusal(methods, _with_facts(site, causal=True))
        self.pooled = _first_refusal([m for m in methods if m.self_only or m.carries], _with_facts(site, pooled=True))
        self.windows = _first_refusal(methods, _with_facts(site, windowed=True))
        self.across = None if site.is_cross else _first_refusal(methods, _with_facts(site, is_cross=True))
        self.joint = None if site.joint else _first_refusal(methods, _with_facts(site, joint=True))
        # Random draws are per sample, and so are values carried between layers.
        self.per_sample = next((repr(m) for m in methods if m.draws() or m.carries), None)

    def check(self, site: Site, q: Tensor, k: Tensor, causal: bool, training: bool) -> None:
        """Raise RuntimeError if a method on the site does not apply to such a call."""
        if causal and self.causal is not None:
            raise RuntimeError(f"{site.name} is called with is_causal=True, and there {self.causal}; {LEAVE_OUT}")
        # With a cache in evaluation there are fewer queries than keys, and the new tokens are the last keys.
        cached = not training and q.shape[2] < k.shape[2]
        if self.pooled is not None and q.shape[2] != k.shape[2] and not cached:
            raise RuntimeError(
                f"{site.name} attends from {q.shape[2]} queries to {k.shape[2]} keys, and {self.pooled}; {LEAVE_OUT}"
            )

    def check_tokens(self, site: Site, apart: bool, across: bool) -> None:
        """Raise RuntimeError if a method does not apply to a call with other tokens that the module did not declare."""
        if across and self.across is not None:
            raise RuntimeError(
                f"{site.name} is called with other tokens for its keys, and there {self.across}; {LEAVE_OUT}"
            )
        if apart and self.joint is not None:
            raise RuntimeError(
                f"{site.name} is called with a text beside its tokens, and there {self.joint}; {LEAVE_OUT}"
            )


def _with_facts(site: Site, **facts: Any) -> Site:
    other = copy.copy(site)
    other.__dict__.update(facts)
    return other


def _first_refusal(methods: list[Method], site: Site) -> str | None:
    for method in methods:
        reason = refusal(method, site)
        if reason is not None:
            return f"{method!r} {reason}"
    return None


def samples_of(fitted: FittedLayer, limits: Limits, shape: Shape, rows: int) -> int | None:
    """Return the number of samples in a call with `rows` rows, or None if each row is one sample.

    Raises:
        RuntimeError: if a method needs the number and the rows cannot be assigned to the samples of the batch.
    """
    site, order = fitted.site, fitted.site.row_order
    whole, in_call = batch(fitted), shape.samples
    if order == OWN:
        return None
    if in_call is not None and whole not in (None, in_call):
        in_call = None
    samples = whole if in_call is None else in_call
    if samples == rows or (samples is None and not site.windowed):
        return None
    if limits.windows is not None and not site.windowed and samples is not None and rows % samples == 0:
        raise RuntimeError(
            f"{site.name} is called with {rows} rows for {samples} samples, as layers that attend in windows are, "
            f"and there {limits.windows}; {LEAVE_OUT}"
        )
    if limits.per_sample is None:
        return None
    if samples is None or rows % samples or (in_call is None and order not in (SAMPLE_MAJOR, WINDOW_MAJOR, FOLDED)):
        raise RuntimeError(_unknown_order(fitted, limits, rows, samples, order))
    return samples


def _unknown_order(fitted: FittedLayer, limits: Limits, rows: int, samples: int | None, order: str | None) -> str:
    start = f"{fitted.site.name} is called with {rows} rows"
    if samples is None:
        return (
            f"{start}, which are windows, and the batch of the whole model is not known here, while "
            f"{limits.per_sample} acts per sample; call the whole model on tensors, not a part of it, or {LEAVE_OUT}"
        )
    reason = (
        "which rows belong to which sample could not be seen on the example"
        if order == UNCLEAR
        else "which rows belong to which sample is not known"
    )
    return f"{start} for {samples} samples, while {limits.per_sample} acts per sample: {reason}; {EXAMPLE}"


class Limited(Served, Protocol):
    """A served site with the limits of its methods."""

    limits: Limits
