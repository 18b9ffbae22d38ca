"""Conversion of a site's call to a reading: the inputs of its softmax, with the methods' edits of the logits."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headwise.attend import Call, FittedLayer, Method
from headwise.health.statistics import Reading
from headwise.health.statistics.reading import LogitBlock
from headwise.numerics.masked import MASKED


def reading_of(call: Call, out: Tensor, product: Tensor | str | None = None, real: Tensor | None = None) -> Reading:
    """Return the reading of one call whose output per head is `out` (B, H, T, Dv).

    Logits are read as they enter the softmax: after the methods' edits, but before keys are dropped at random, because
    that is noise of one step and not the health of a head.

    Args:
        product: the spectral norms of W_QᵀW_K per head (H,), or the reason why there are none.
        real: which queries are real tokens, bool (B, T); derived from the mask if it is None.
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
        gate=call.gates,
        real_queries=real,
        self_attention=not call.is_cross,
        windowed=site.windowed,
        product_norm=product if isinstance(product, Tensor) else None,
        product_obstacle=obstacle,
        edit=edit,
        text=call.text,
    )


def _edited(call: Call, editing: list[Method]) -> tuple[Tensor, Tensor, MethodsEdit | None]:
    """Return q and k after the methods' edits; if one needs the logits, return them as they are and a MethodsEdit."""
    q, k = call.q, call.k
    for method in editing:
        edited = method.scores(q, k, call) if method.overrides("scores") else None
        if edited is None:
            return call.q, call.k, MethodsEdit(call, editing)
        q, k = edited
    return q, k, None


class MethodsEdit:
    """Edit of a block of logits by the methods of a call, in their order."""

    def __init__(self, call: Call, methods: list[Method]) -> None:
        self.call, self.methods = call, methods
        self.together = any(not method.rowwise for method in methods)
        self._whole: Tensor | None = None

    def __call__(self, logits: Tensor, block: LogitBlock) -> Tensor:
        """Return the edited logits (b, H, r, w); forbidden keys are -inf before and after."""
        if self.together:
            return self._block_of_whole(block, logits.shape[-1]).to(logits.dtype)
        part = copy.copy(self.call)
        part.whole, part.positions = self.call, block.positions
        part.q, part.mask = block.q, block.mask
        part.k = block.k.repeat_interleave(block.q.shape[1] // block.k.shape[1], 1)
        part._allowed, part._allowed_known = block.allowed, True
        part.batch, part.heads, part.queries, part.keys = logits.shape
        for method in self.methods:
            logits = method.logits(logits, part)
        return logits

    def _block_of_whole(self, block: LogitBlock, width: int) -> Tensor:
        """Return a block of the whole call's edited logits, for methods that need the rows of all queries together."""
        if self._whole is None:
            self._whole = FittedLayer.logits(self.call, self.methods)
        part = self._whole[block.samples, :, :, :width]
        rows = block.positions[:, None, :, None].expand(*part.shape[:2], -1, width)
        return part.gather(2, rows)


def _obstacle(call: Call, editing: list[Method]) -> str | None:
    """Return why the logits of this call depend on more than the query and key weights; None if they do not."""
    site = call.site
    if site.rope:
        return "rotary positions turn queries and keys"
    if site.qk_norm:
        return "queries and keys are normalised"
    edits = [m for m in call.layer.active(call.training) if m.overrides("inputs")] + editing
    return f"{edits[0]!r} edits them" if edits else None


def _tokens(call: Call) -> Tensor | None:
    """Return the layer's input as (samples, tokens, C), with a grid of tokens flattened; None if it has no tokens."""
    hidden = call.hidden
    if hidden is None or hidden.dim() < 3:
        return None
    if hidden.dim() == 3:
        return hidden
    return hidden.flatten(1, -2) if call.site.windowed else None


def real_queries(call: Call) -> Tensor | None:
    """Return which queries are real tokens and not padding, bool (B, T), from the mask alone; None if it does not say.

    In self attention a padded token is one that no query may see. The mask is reduced without being expanded.
    """
    mask = call.mask
    if mask is None or call.is_cross or call.queries != call.keys:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    seen = mask.any(2) if mask.dtype == torch.bool else mask.amax(2) > MASKED
    return seen.any(1).expand(call.batch, call.queries)
