"""Passes: which pass through a site this is, and whether it is the first time or a recompute.

Activation checkpointing runs a layer again in the backward. Its draws must then be those of the first time, and its
penalties must not count again. The saved-tensor hooks that checkpointing itself installs tell both.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .draws import mix

if TYPE_CHECKING:
    from .fitted import Fitted

REENTRANT = (
    "{site} was run again inside a backward pass, as reentrant or nested activation checkpointing does; {method} would draw, "
    "penalise or carry values a second time and its gradient would be silently wrong. "
    "Use one level of checkpoint(..., use_reentrant=False), or gradient_checkpointing_kwargs={{'use_reentrant': False}}."
)
COMPILED = (
    "{site} was recomputed inside a compiled graph's backward: activation checkpointing inside torch.compile would draw "
    "again for {method}. Compile the layer and checkpoint around it: checkpoint(torch.compile(layer), x, use_reentrant=False)."
)


@dataclass
class Region:
    """What one checkpointed region remembers of its first run."""

    keys: dict[int, list[int]] = field(default_factory=dict)
    replay: dict[Any, dict[int, int]] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    sites: list[Any] = field(default_factory=list)


_regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def region() -> tuple[Region | None, Any]:
    """Give the checkpointed region that runs now and the recompute's id (None in its first run).

    Reads the innermost saved-tensor hook; the young private functions stand here alone. Where they are missing, no region
    is seen, and a recompute is refused as a reentrant one is.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    try:
        hooks = top(False) if top is not None else None
    except (RuntimeError, TypeError):
        hooks = None
    if hooks is None:
        return None, None
    pack = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, (c.cell_contents for c in pack.__closure__ or ()), strict=False)) if names else {}
    if "frame" in cells:
        return _regions.setdefault(cells["frame"], Region()), None
    if "target_frame_ref" in cells:
        frame = cells["target_frame_ref"]()
        return _regions.setdefault(frame, Region()), cells.get("gid", 0)
    return None, None


def in_backward() -> bool:
    """Tell whether the code runs inside autograd's backward."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


@dataclass
class Pass:
    """One pass: the key of its draws and whether it repeats an earlier one.

    `key` is a whole number, or inside a compiled graph a 0-d int64 tensor; there `again` is a tensor too.
    """

    key: int | Tensor
    again: bool | Tensor = False
    region: Region | None = None


def begin(fitted: Fitted) -> Pass:
    """Open a pass through a site: count it, or find the pass that it repeats."""
    if torch.compiler.is_compiling():
        token = compiled_token(fitted.counter, fitted.number)
        return Pass(token[0], token[1])
    key, again, where = _begin(fitted)
    return Pass(key, again, where)


def _begin(fitted: Fitted) -> tuple[int, bool, Region | None]:
    where, recompute = region()
    if where is not None and recompute is not None:
        at = where.replay.setdefault(recompute, {})
        nth = at.get(fitted.number, 0)
        at[fitted.number] = nth + 1
        known = where.keys.get(fitted.number, [])
        if nth < len(known):
            return known[nth], True, where
    if in_backward():
        raise RuntimeError(REENTRANT.format(site=fitted.site.name, method=fitted.stateful()))
    key = mix(fitted.seed(), fitted.site.index, int(fitted.counter))
    fitted.counter.add_(1)
    if where is not None:
        where.keys.setdefault(fitted.number, []).append(key)
    return key, False, where


_numbers = itertools.count(1)
_fitted: weakref.WeakValueDictionary[int, Fitted] = weakref.WeakValueDictionary()


def enroll(fitted: Fitted) -> int:
    """Give a fitted site the number by which compiled graphs find it."""
    number = next(_numbers)
    _fitted[number] = fitted
    return number


def enrolled() -> list[Fitted]:
    """Give the fitted sites that are still in use."""
    return [fitted for fitted in _fitted.values() if fitted.alive]


@torch.library.custom_op("headwise::token", mutates_args={"counter"})
def compiled_token(counter: Tensor, number: int) -> Tensor:
    """Give (key, again) of a pass when a compiled graph runs; the graph itself holds no state."""
    fitted = _fitted[number]
    where, recompute = region()
    if in_backward() and recompute is None:
        raise RuntimeError(COMPILED.format(site=fitted.site.name, method=fitted.stateful()))
    if where is not None and recompute is not None:
        key, again, _ = _begin(fitted)
        return torch.tensor([key, int(again)], dtype=torch.int64)
    key = mix(fitted.seed(), fitted.site.index, int(counter))
    counter.add_(1)
    if where is not None:
        where.keys.setdefault(number, []).append(key)
    return torch.tensor([key, 0], dtype=torch.int64)


@compiled_token.register_fake
def _(counter: Tensor, number: int) -> Tensor:
    return torch.empty(2, dtype=torch.int64)
