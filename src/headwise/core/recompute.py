"""Recompute: detection of the checkpointed region that is running, and of whether it is being recomputed.

Activation checkpointing runs a layer again in backward. The second run must repeat the draws of the first, and its
penalties must not count again. Both runs are recognised by the saved-tensor hooks that checkpointing installs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Region:
    """The record of a checkpointed region's first run.

    Attributes:
        keys: keys of the passes through each layer, by the number of its `Passes`.
        replay: for each recompute, by its id, how many passes of each layer it has repeated.
        carried: values of the first self attention, by stack.
        sites: adapters of the sites whose fused attention calls it made.
    """

    keys: dict[int, list[int]] = field(default_factory=dict)
    replay: dict[Any, dict[int, int]] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    sites: list[Any] = field(default_factory=list)


# Keyed by the frame object that checkpointing makes for each region, so that a region is freed with its graph.
_regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def _pack_functions() -> list[Any]:
    """Return the pack functions of the active saved-tensor hooks, innermost first, and leave the hooks unchanged.

    This is the only use of torch's private functions for it. Without them no region is detected, and a recompute is
    refused like a reentrant one.
    """
    autograd, popped = torch._C._autograd, []
    if not hasattr(autograd, "_top_saved_tensors_default_hooks"):
        return []
    try:
        while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            popped.append(hooks)
    except (RuntimeError, TypeError):
        return []
    finally:
        # The stack can only be read by popping it; it is restored in every case.
        for hooks in reversed(popped):
            autograd._push_saved_tensors_default_hooks(*hooks)
    return [hooks[0] for hooks in popped]


def regions() -> tuple[list[Region], Region | None, Any]:
    """Return the regions that run for the first time, the region being recomputed or None, and the recompute's id.

    Regions may be nested: while an outer one is recomputed, its inner ones run for the first time.
    """
    first: list[Region] = []
    for pack in _pack_functions():
        # Dynamo wraps the function, whose closure is needed here.
        pack = getattr(pack, "_torchdynamo_orig_callable", pack)
        names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, (c.cell_contents for c in pack.__closure__ or ()), strict=False)) if names else {}
        # The hooks of the first run are closures over `frame`, those of the recompute over a reference to that frame.
        if "frame" in cells:
            first.append(_regions.setdefault(cells["frame"], Region()))
        elif "target_frame_ref" in cells:
            return first, _regions.setdefault(cells["target_frame_ref"](), Region()), cells.get("gid", 0)
    return first, None, None


def region() -> tuple[Region | None, Any]:
    """Return the region being recomputed and the recompute's id, else the outermost region that runs first, or None."""
    first, repeated, recompute = regions()
    return (repeated, recompute) if repeated is not None else (first[-1] if first else None, None)


def in_backward() -> bool:
    """Return whether the code runs inside autograd's backward."""
    # The id is -1 if no backward runs in this thread.
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


@dataclass
class Pass:
    """One pass through a layer: the key of its draws, and whether it repeats an earlier pass.

    `key` is an integer and `again` a bool; inside a compiled graph both are 0-d int64 tensors.
    """

    key: int | Tensor
    again: bool | Tensor = False
    region: Region | None = None
    first_runs: list[Region] = field(default_factory=list)
