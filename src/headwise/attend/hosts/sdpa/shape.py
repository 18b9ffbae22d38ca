"""Map the leading dimensions of a call to (B, H), and rows of B to samples; refuse calls that methods cannot take."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method, Site
from headwise.attend.hosts.layers.refusal import refusal
from headwise.borders import in_backward
from headwise.files.errors import LEAVE_OUT

# The hosts whose calls are assigned to sites by the forward that runs.
SERVED = ("fused", "diffusers")
# The orders of rows that an example can show, stored on the site as `row_order`.
SAMPLE_MAJOR, WINDOW_MAJOR, FOLDED, OWN, UNCLEAR = "sample-major", "window-major", "heads folded", "own", "unclear"
EXAMPLE = (
    "pass example=batch (with two or more different samples) to regularize(), so that the order is seen, or "
    f"{LEAVE_OUT}"
)


class Served(Protocol):
    """An adapter whose attention calls are served, as the modules of this host see it.

    Attributes:
        limits: those of the methods on its site.
        heads: the number that the module declares; the site's number may come from an example instead.
        record: the calls recorded while the model runs on an example; None otherwise.
    """

    site: Site
    heads: int | None
    fitted: FittedLayer | None
    limits: Limits
    record: list[tuple[Tensor, Tensor, Tensor, int]] | None

    def other_tokens(self, queries: int, keys: int) -> tuple[slice | None, bool, bool]:
        """Return the slice of the text tokens, whether the text was passed separately, and whether the keys are tokens
        other than the queries."""
        ...


class Shape:
    """The layout of one call: 4-D (B, H, T, D); 5-D and more with windows; 3-D and 2-D without a head dimension.

    Attributes:
        shape: the shape of the host's queries.
        heads_at: the dimension of the heads; None if there is none.
        folded: the number of heads that share the first dimension of a 3-D call with the samples, or 0.
        window_major: the number of samples, if the first window of all samples comes first, then the second; else None.
    """

    def __init__(self, shape: torch.Size, heads_at: int | None, folded: int = 0, samples: int | None = None) -> None:
        self.shape, self.heads_at, self.folded = shape, heads_at, folded
        self.window_major = samples

    @classmethod
    def of(cls, adapter: Served, q: Tensor, k: Tensor) -> Shape:
        """Return the layout of a call, from its queries, its keys and the number of heads that the module declares.

        Raises:
            RuntimeError: if the dimension of the heads cannot be determined.
        """
        fitted, site = adapter.fitted, adapter.site
        assert fitted is not None
        if q.dim() > 4:
            return cls(q.shape, _heads_at(site, adapter.heads, q, k))
        if q.dim() == 4:
            samples = batch(fitted) if site.row_order == WINDOW_MAJOR else None
            return cls(q.shape, 1, samples=samples)
        if q.dim() == 3 and adapter.heads is not None and adapter.heads > 1:
            return cls(q.shape, None, _folded(adapter, fitted, adapter.heads, q))
        return cls(q.shape, None)

    def to4(self, x: Tensor) -> Tensor:
        """Return x (..., T, D) as (B, H, T, D), with the rows of a sample adjacent."""
        if self.folded:
            return x.unflatten(0, (-1, self.folded))
        if x.dim() < 4:
            return x.unsqueeze(0).unsqueeze(0) if x.dim() == 2 else x.unsqueeze(1)
        if x.dim() > 4:
            assert self.heads_at is not None
            return x.movedim(self.heads_at, -3).flatten(0, -4)
        if self.window_major is not None and x.shape[0] > 1:
            return x.unflatten(0, (-1, self.window_major)).transpose(0, 1).flatten(0, 1)
        return x

    def from4(self, x: Tensor) -> Tensor:
        """Return the output (B, H, T, D) in the layout of the host's queries."""
        if self.folded:
            return x.flatten(0, 1)
        if len(self.shape) < 4:
            return x.squeeze(1) if len(self.shape) == 3 else x.squeeze(1).squeeze(0)
        if len(self.shape) > 4:
            assert self.heads_at is not None
            lead = [n for i, n in enumerate(self.shape[:-2]) if i != self.heads_at]
            return x.unflatten(0, lead).movedim(-3, self.heads_at)
        if self.window_major is not None:
            return x.unflatten(0, (self.window_major, -1)).transpose(0, 1).flatten(0, 1)
        return x

    def mask4(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask that broadcasts to the host's (..., T, N) as one that broadcasts to (B, H, T, N)."""
        if mask is None:
            return None
        if all(n == 1 for n in mask.shape[:-2]):
            return mask.reshape(1, 1, *mask.shape[-2:])
        if len(self.shape) == 4 and (self.window_major is None or mask.dim() < 4 or mask.shape[0] == 1):
            return mask[(None,) * (4 - mask.dim())]
        return self.to4(mask.expand(*self.shape[:-2], *mask.shape[-2:]))

    @property
    def samples(self) -> int | None:
        """Return the number of samples if the call shows it: the first dimension of a call with more than 4."""
        return self.shape[0] if len(self.shape) > 4 else None


def broadcast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v expanded to one batch size, as the function broadcasts them."""
    rows = max(q.shape[0], k.shape[0], v.shape[0])
    if not q.shape[0] == k.shape[0] == v.shape[0] == rows:
        q, k, v = (x if x.shape[0] == rows else x.expand(rows, -1, -1, -1) for x in (q, k, v))
    return q, k, v


def with_causality(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return a mask that also hides from each query the keys after it."""
    order = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    return mask & order if mask.dtype == torch.bool else mask.masked_fill(~order, float("-inf"))


def batch(fitted: FittedLayer) -> int | None:
    """Return the number of samples that the whole model was called with, or None if unknown."""
    forward = fitted.running()
    is_known = torch.compiler.is_compiling() or forward.running or in_backward()
    return forward.samples if is_known else None


def _heads_at(site: Site, heads: int | None, q: Tensor, k: Tensor) -> int:
    places = [i for i in range(1, q.dim() - 2) if heads in (None, q.shape[i])]
    if len(places) > 1:
        # A projection's heads are adjacent in memory: their stride is the size of one head, however x was permuted.
        places = [i for i in places if k.stride(i) == k.shape[-1] * k.stride(-1)] or places
    if len(places) != 1:
        raise RuntimeError(
            f"{site.name} calls attention with q of shape {tuple(q.shape)}, and which dimension holds its heads "
            f"({heads or 'unknown'}) cannot be determined; give the module a num_heads attribute, or call "
            "attention with (B, H, T, D)"
        )
    return places[0]


def _folded(adapter: Served, fitted: FittedLayer, heads: int, q: Tensor) -> int:
    """Return the number of heads that are folded into the first dimension, innermost; 0 if none are."""
    order = fitted.site.row_order
    if order == OWN or q.shape[0] % heads:
        return 0
    if order == FOLDED or adapter.record is not None:
        return heads
    samples = batch(fitted)
    raise RuntimeError(
        f"{fitted.site.name} has {heads} heads and calls attention with q of shape {tuple(q.shape)}"
        f"{'' if samples is None else f' for {samples} samples'}: whether its first dimension holds heads, and in "
        f"which order, is not known; {EXAMPLE}"
    )


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
                f"{site.name} is called with a text in addition to its tokens, and there {self.joint}; {LEAVE_OUT}"
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
