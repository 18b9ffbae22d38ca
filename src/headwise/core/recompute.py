"""Recompute: which checkpointed region runs now, and whether it runs for the first time.

Activation checkpointing runs a layer again in the backward. Its draws must then be those of the first time, and its
penalties must not count again. The saved-tensor hooks that checkpointing itself installs tell both.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Region:
    """What one checkpointed region remembers of its first run."""

    keys: dict[int, list[int]] = field(default_factory=dict)
    replay: dict[Any, dict[int, int]] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    sites: list[Any] = field(default_factory=list)


# By the frame object that checkpointing makes for each region: a region is forgotten when its graph is.
_regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def _pack_functions() -> list[Any]:
    """Return the pack functions of the saved-tensor hooks in force, the innermost first; the hooks stay as they were.

    The young private functions stand here alone. Where they are missing, no region is seen, and a recompute is refused
    as a reentrant one is.
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
        # There is no way to look at the stack but to take it apart: it is put together again in every case.
        for hooks in reversed(taken):
            autograd._push_saved_tensors_default_hooks(*hooks)
    return [hooks[0] for hooks in taken]


def regions() -> tuple[list[Region], Region | None, Any]:
    """Return the checkpointed regions in their first run, the one that is recomputed or None, and the recompute's id.

    Regions may be nested: while an outer one is recomputed, its inner ones run for the first time.
    """
    first: list[Region] = []
    for pack in _pack_functions():
        # Dynamo wraps the function; its closure is in the one inside.
        pack = getattr(pack, "_torchdynamo_orig_callable", pack)
        names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, (c.cell_contents for c in pack.__closure__ or ()), strict=False)) if names else {}
        # torch closes the hooks of the first run over `frame`, and those of the recompute over a reference to that
        # frame.
        if "frame" in cells:
            first.append(_regions.setdefault(cells["frame"], Region()))
        elif "target_frame_ref" in cells:
            return first, _regions.setdefault(cells["target_frame_ref"](), Region()), cells.get("gid", 0)
    return first, None, None


def region() -> tuple[Region | None, Any]:
    """Return the region that is recomputed with the recompute's id, or the outermost that runs first, or None."""
    first, repeated, recompute = regions()
    return (repeated, recompute) if repeated is not None else (first[-1] if first else None, None)


def in_backward() -> bool:
    """Return whether the code runs inside autograd's backward."""
    # -1 says that no backward runs in this thread.
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
