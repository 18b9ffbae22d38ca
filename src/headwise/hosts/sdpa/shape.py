"""Map the leading dimensions of a call to (B, H), and rows of B to samples."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headwise.attention.fitted_layer import FittedLayer
from headwise.core import recompute as passes
from headwise.core.site import Site
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
        heads: the number that the module declares; the site's number may come from an example instead.
        record: the calls recorded while the model runs on an example; None otherwise.
    """

    site: Site
    heads: int | None
    fitted: FittedLayer | None
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
    q, k, v = (x if x.shape[0] == rows else x.expand(rows, -1, -1, -1) for x in (q, k, v))
    return q, k, v


def with_causality(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return a mask that also hides from each query the keys after it."""
    order = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    return mask & order if mask.dtype == torch.bool else mask.masked_fill(~order, float("-inf"))


def batch(fitted: FittedLayer) -> int | None:
    """Return the number of samples that the whole model was called with, or None if unknown."""
    forward = fitted.running()
    is_known = torch.compiler.is_compiling() or forward.running or passes.in_backward()
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
