"""From a call of a site to a reading of the statistics: what the softmax saw, methods' edits of the logits included."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headwise.attention.softmax import logits as made
from headwise.core.call import Call
from headwise.core.masked import MASKED
from headwise.core.method import Method
from headwise.statistics import Reading
from headwise.statistics.reading import LogitBlock


def reading_of(call: Call, out: Tensor, product: Tensor | str | None = None, real: Tensor | None = None) -> Reading:
    """Make the reading of one call whose output per head is `out` (B, H, T, Dv).

    Logits are read as the softmax gets them: after the methods' edits, but before keys are dropped at random, which is
    noise of one step and not the health of a head.

    Args:
        product: the spectral norms of W_QᵀW_K per head (H,), or why there are none.
        real: which queries are real tokens (B, T), where that is known; else it is read off the mask.
    """
    site = call.site
    editing = [m for m in call.layer.active(call.training) if m.overrides("logits") and not m.draws()]
    q, k, edit = _edited(call, editing)
    mask = call.mask
    obstacle = product if isinstance(product, str) else _obstacle(call, editing)
    hidden = _tokens(call)
    if real is None and not site.windowed:
        real = real_queries(call)
    return Reading(
        q,
        k,
        call.v,
        mask=mask,
        causal=call.causal and call.queries > 1,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        hidden=hidden,
        output=out,
        real_queries=real,
        self_attention=not call.is_cross,
        windowed=site.windowed,
        product_norm=product if isinstance(product, Tensor) else None,
        product_obstacle=obstacle,
        edit=edit,
        text=call.text,
    )


def _edited(call: Call, editing: list[Method]) -> tuple[Tensor, Tensor, LogitEdit | None]:
    """Return q and k with the edits that can be made on them, or an edit of the logits where one of them cannot."""
    q, k = call.q, call.k
    for method in editing:
        edited = method.scores(q, k, call) if method.overrides("scores") else None
        if edited is None:
            return call.q, call.k, LogitEdit(call, editing)
        q, k = edited
    return q, k, None


class LogitEdit:
    """Takes a block of logits through the methods that edit them, in their order."""

    def __init__(self, call: Call, methods: list[Method]) -> None:
        self.call, self.methods = call, methods
        self.together = any(not method.rowwise for method in methods)
        self._whole: Tensor | None = None

    def __call__(self, logits: Tensor, block: LogitBlock) -> Tensor:
        """Edit logits (b, H, r, w); forbidden keys come in and go out as -inf."""
        if self.together:
            return self._cut(block, logits.shape[-1]).to(logits.dtype)
        part = copy.copy(self.call)
        part.whole, part.positions = self.call, block.positions
        part.q, part.mask = block.q, block.mask
        part.k = block.k.repeat_interleave(block.q.shape[1] // block.k.shape[1], 1)
        part._allowed, part._allowed_known = block.allowed, True
        part.batch, part.heads, part.queries, part.keys = logits.shape
        for method in self.methods:
            logits = method.logits(logits, part)
        return logits

    def _cut(self, block: LogitBlock, width: int) -> Tensor:
        """Return the block of the whole call's edited logits: one of the methods needs the rows of all queries
        together."""
        if self._whole is None:
            edited = made(self.call, self.call.q, self.call.k)
            for method in self.methods:
                edited = method.logits(edited, self.call)
            self._whole = edited
        part = self._whole[block.samples, :, :, :width]
        rows = block.positions[:, None, :, None].expand(*part.shape[:2], -1, width)
        return part.gather(2, rows)


def _obstacle(call: Call, editing: list[Method]) -> str | None:
    """Say why the logits of this call are not made by the query and key weights alone, or None where they are."""
    site = call.site
    if site.rope:
        return "rotary positions turn queries and keys"
    if site.qk_norm:
        return "queries and keys are normalised"
    edits = [m for m in call.layer.active(call.training) if m.overrides("inputs")] + editing
    return f"{edits[0]!r} edits them" if edits else None


def _tokens(call: Call) -> Tensor | None:
    """Return what entered the layer as (samples, tokens, C); a grid of tokens is laid out in a row."""
    hidden = call.hidden
    if hidden is None or hidden.dim() < 3:
        return None
    if hidden.dim() == 3:
        return hidden
    return hidden.flatten(1, -2) if call.site.windowed else None


def real_queries(call: Call) -> Tensor | None:
    """Tell real tokens from padding, bool (B, T), from the mask alone; None where all are real.

    In self attention a padded token is one that no query may see. The mask is reduced as it is, never expanded.
    """
    mask = call.mask
    if mask is None or call.is_cross or call.queries != call.keys:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    seen = mask.any(2) if mask.dtype == torch.bool else mask.amax(2) > MASKED
    return seen.any(1).expand(call.batch, call.queries)
