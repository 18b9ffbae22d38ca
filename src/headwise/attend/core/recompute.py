"""Recompute: detection of the checkpointed region that is running, and of whether it is being recomputed.

Activation checkpointing runs a layer again in backward. The second run must repeat the draws of the first, and its
penalties must not count again. Both runs are recognised by the saved-tensor hooks that checkpointing installs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headwise.borders import checkpoint_of, graph_task, pack_functions


@dataclass
class Region:
    """The record of a checkpointed region's first run.

    Attributes:
        keys: keys of the passes through each layer, by the number of its `Passes`.
        replay: for each recompute, by its id, how many passes of each layer it has repeated.
        carried: values of the first self attention, by stack.
        sites: adapters of the sites whose fused attention calls it made.
    """

    keys: dict[int, list[int | Tensor]] = field(default_factory=dict)
    replay: dict[Any, dict[int, int]] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    sites: list[Any] = field(default_factory=list)


# Keyed by the frame object that checkpointing makes for each region, so that a region is freed with its graph.
_regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def regions() -> tuple[list[Region], Region | None, Any]:
    """Return the regions that run for the first time, the region being recomputed or None, and the recompute's id.

    Regions may be nested: while an outer one is recomputed, its inner ones run for the first time.
    """
    first: list[Region] = []
    for pack in pack_functions():
        checkpoint = checkpoint_of(pack)
        if checkpoint is None:
            continue
        frame, again, recompute = checkpoint
        record = _regions.setdefault(frame, Region())
        if again:
            return first, record, recompute
        first.append(record)
    return first, None, None


def region() -> tuple[Region | None, Any]:
    """Return the region being recomputed and the recompute's id, else the outermost region that runs first, or None."""
    first, repeated, recompute = regions()
    return (repeated, recompute) if repeated is not None else (first[-1] if first else None, None)


def in_backward() -> bool:
    """Return whether the code runs inside autograd's backward."""
    return graph_task() != -1


@dataclass
class Pass:
    """One pass through a layer: the key of its draws, and whether it repeats an earlier pass.

    `key` is an integer and `again` a bool; inside a compiled graph both are 0-d int64 tensors.
    """

    key: int | Tensor
    again: bool | Tensor = False
    region: Region | None = None
    first_runs: list[Region] = field(default_factory=list)
