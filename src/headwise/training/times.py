"""What a clock measured of a run, in a file beside its checkpoint: checkpoints of equal runs are equal files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headwise.files.durable import as_line, read_json
from headwise.results.records import Apart, EpochLine
from headwise.training.state import RunState

TIMES = "times.json"


def save_times(folder: Path, state: RunState) -> None:
    """Write the times of every epoch and the memory of a step; they need not survive a power cut, and so are not flushed."""
    told = {str(line.epoch): [line.seconds, line.apart.steps, line.apart.seconds] for line in state.history}
    coming = folder / f"{TIMES}.partial"
    coming.write_text(as_line({"peak_memory": state.peak_memory, "epochs": told}), encoding="utf-8")
    os.replace(coming, folder / TIMES)


def without_times(state: RunState) -> RunState:
    """Give what of a state every equal run has."""
    history = [line.model_copy(update={"seconds": 0.0, "apart": Apart()}) for line in state.history]
    return state.model_copy(update={"history": history, "peak_memory": None})


def with_times(state: RunState, folder: Path) -> RunState:
    """Give a state with its times back; an epoch whose time is lost counts for none. A state of version 0.1 has its own."""
    found = read_json(folder / TIMES)
    told = found if isinstance(found, dict) else {}
    epochs = told.get("epochs")
    history = [_timed(line, epochs if isinstance(epochs, dict) else {}) for line in state.history]
    memory = told.get("peak_memory", state.peak_memory)
    return state.model_copy(update={"history": history, "peak_memory": memory if isinstance(memory, int) else None})


def _timed(line: EpochLine, epochs: dict[str, Any]) -> EpochLine:
    if line.seconds:
        return line
    try:
        seconds, steps, apart = epochs[str(line.epoch)]
        update = {"seconds": float(seconds), "apart": Apart(steps=int(steps), seconds=float(apart))}
    except (KeyError, TypeError, ValueError):
        update = {"apart": Apart(steps=line.steps)}
    return line.model_copy(update=update)
