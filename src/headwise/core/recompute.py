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

from headwise.core.random_draws import mix

if TYPE_CHECKING:
    from headwise.regularizing.fitted_site import Fitted

REENTRANT = (
    "{site} was run again inside a backward pass, as reentrant activation checkpointing does; {method} would draw, "
    "penalise or carry values a second time and its gradient would be silently wrong. "
    "Use checkpoint(..., use_reentrant=False), or gradient_checkpointing_kwargs={{'use_reentrant': False}}."
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


def _pack_functions() -> list[Any]:
    """Give the pack functions of the saved-tensor hooks in force, the innermost first; the hooks stay as they were.

    The young private functions stand here alone. Where they are missing, no region is seen, and a recompute is refused as a
    reentrant one is.
    """
    autograd, taken = torch._C._autograd, []
    if not hasattr(autograd, "_top_saved_tensors_default_hooks"):
        return []
    try:
        while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            taken.append(hooks)
    except (RuntimeError, TypeError):
        return []
    finally:
        for hooks in reversed(taken):
            autograd._push_saved_tensors_default_hooks(*hooks)
    return [hooks[0] for hooks in taken]


def regions() -> tuple[list[Region], Region | None, Any]:
    """Give the checkpointed regions in their first run, the one that is recomputed or None, and the recompute's id.

    Regions may be nested: while an outer one is recomputed, its inner ones run for the first time.
    """
    first: list[Region] = []
    for pack in _pack_functions():
        pack = getattr(pack, "_torchdynamo_orig_callable", pack)
        names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, (c.cell_contents for c in pack.__closure__ or ()), strict=False)) if names else {}
        if "frame" in cells:
            first.append(_regions.setdefault(cells["frame"], Region()))
        elif "target_frame_ref" in cells:
            return first, _regions.setdefault(cells["target_frame_ref"](), Region()), cells.get("gid", 0)
    return first, None, None


def region() -> tuple[Region | None, Any]:
    """Give the region that is recomputed with the recompute's id, or the outermost that runs first, or None."""
    first, repeated, recompute = regions()
    return (repeated, recompute) if repeated is not None else (first[-1] if first else None, None)


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
    first_runs: list[Region] = field(default_factory=list)


def begin(fitted: Fitted) -> Pass:
    """Open a pass through a site: count it, or find the pass that it repeats."""
    if torch.compiler.is_compiling():
        token = compiled_token(fitted.counter, fitted.number)
        return Pass(token[0], token[1])
    return _begin(fitted)


def _begin(fitted: Fitted) -> Pass:
    first, repeated, recompute = regions()
    if repeated is not None:
        at = repeated.replay.setdefault(recompute, {})
        nth = at.get(fitted.number, 0)
        at[fitted.number] = nth + 1
        known = repeated.keys.get(fitted.number, [])
        if nth < len(known):
            _remember(first, fitted, known[nth])
            return Pass(known[nth], True, repeated, first)
    if in_backward():
        raise RuntimeError(REENTRANT.format(site=fitted.site.name, method=fitted.stateful()))
    key = mix(fitted.seed(), fitted.site.index, int(fitted.counter))
    fitted.counter.add_(1)
    _remember(first, fitted, key)
    return Pass(key, False, first[-1] if first else None, first)


def _remember(first: list[Region], fitted: Fitted, key: int) -> None:
    for region in first:
        region.keys.setdefault(fitted.number, []).append(key)


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
    first, repeated, _ = regions()
    if in_backward() and repeated is None:
        raise RuntimeError(COMPILED.format(site=fitted.site.name, method=fitted.stateful()))
    if repeated is not None:
        made = _begin(fitted)
        return torch.tensor([made.key, int(made.again)], dtype=torch.int64)
    key = mix(fitted.seed(), fitted.site.index, int(counter))
    counter.add_(1)
    _remember(first, fitted, key)
    return torch.tensor([key, 0], dtype=torch.int64)


@compiled_token.register_fake
def _(counter: Tensor, number: int) -> Tensor:
    return torch.empty(2, dtype=torch.int64)
