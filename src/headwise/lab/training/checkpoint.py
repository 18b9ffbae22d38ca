"""Checkpoints: one safetensors file with the tensors and the state of a run, protected by a checksum.

Writing a checkpoint keeps the previous one until the new one is complete. The health readings of a watched run are in a
file next to it; a run resumes from both together, or starts again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headwise.files.durable import write_bytes
from headwise.lab.training.job import Order
from headwise_verdict.files import read_lines, restore_lines
from headwise_verdict.results import RunFiles, StoredRecord


class Mark(StoredRecord):
    """The size and digest of the file of readings at the time a checkpoint was written."""

    size: int
    sha256: str


def mark(folder: Path, before: Mark | None) -> Mark:
    """Return the mark of a run's readings; `before`, the last mark, is reused if the size has not changed."""
    path = RunFiles(folder).health
    if before is not None and path.exists() and path.stat().st_size == before.size:
        return before
    content = path.read_bytes() if path.exists() else b""
    return Mark(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def stands(folder: Path, known: Mark | None) -> bool:
    """Return whether the readings recorded by a checkpoint are present; `known` is None if it recorded none."""
    return known is None or hashlib.sha256(_until(folder, known)).hexdigest() == known.sha256


def restore_readings(folder: Path, known: Mark | None, step: int) -> None:
    """Cut the file back to the readings recorded by the checkpoint at `step`; later ones are measured again."""
    path = RunFiles(folder).health
    if known is None:
        cut_readings(folder, step)
    elif path.exists() and path.stat().st_size != known.size:
        write_bytes(path, _until(folder, known))


def cut_readings(folder: Path, step: int) -> None:
    """Drop the readings of `step` and later; a reading of step n is taken before update n + 1."""
    path = RunFiles(folder).health
    restore_lines(path, [record for record in read_lines(path) if record["step"] < step])


def _until(folder: Path, known: Mark) -> bytes:
    path = RunFiles(folder).health
    if not path.exists():
        return b""
    with open(path, "rb") as stream:
        return stream.read(known.size)


PREVIOUS = "checkpoint.previous.safetensors"
WHOLE = "checkpoint"
COMING = "checkpoint.new.safetensors"


@dataclass(frozen=True)
class RunCheckpoint:
    """The tensors of a run and its plain state (epoch, history, draws) at the end of an epoch."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: RunCheckpoint) -> None:
    """Write a checkpoint; the previous one stays until the new one is complete on disk."""
    # copies, because tied weights share storage, which the format refuses
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in checkpoint.tensors.items()}
    state = json.dumps(checkpoint.state)
    # one entry, because the format writes several in any order, and equal runs must have equal files
    content = save(tensors, metadata={WHOLE: json.dumps({"crc32": _checksum(tensors, state), "state": state})})
    current, unfinished = RunFiles(folder).checkpoint, folder / COMING
    write_bytes(unfinished, content)
    if current.exists():
        os.replace(current, folder / PREVIOUS)
    os.replace(unfinished, current)


def load_checkpoint(folder: Path, note: Callable[[str], None], run: str = "") -> RunCheckpoint | None:
    """Return the newest complete checkpoint of a run, or None; call `note` for each that is damaged or foreign."""
    for path in _newest_first(folder):
        if not path.exists():
            continue
        try:
            checkpoint = read_checkpoint(path)
            _refuse_other(checkpoint, run)
            if path.name == COMING:
                # the process ended before it renamed the new file
                os.replace(path, RunFiles(folder).checkpoint)
            return checkpoint
        except FileNotFoundError:
            # another process that reads here renamed the new file in between
            if path.name == COMING:
                return load_checkpoint(folder, note, run)
            continue
        except (SafetensorError, ValueError, KeyError) as error:
            note(f"{path} is damaged ({error}); resuming from the checkpoint before it, or from the start")
    return None


def drop_previous(folder: Path) -> None:
    """Remove the files that a finished run no longer needs; its last checkpoint stays."""
    for name in (COMING, PREVIOUS):
        (folder / name).unlink(missing_ok=True)


def drop_all(folder: Path) -> None:
    """Remove every checkpoint of a run that has to start again."""
    for path in _newest_first(folder):
        path.unlink(missing_ok=True)


def _newest_first(folder: Path) -> tuple[Path, ...]:
    return folder / COMING, RunFiles(folder).checkpoint, folder / PREVIOUS


def _refuse_other(checkpoint: RunCheckpoint, run: str) -> None:
    if run and checkpoint.state["run"] != run:
        raise ValueError(f"it is of the run {checkpoint.state['run']}")


def read_checkpoint(path: Path) -> RunCheckpoint:
    """Return the checkpoint in one file; raise SafetensorError, ValueError or KeyError if it is damaged."""
    content = path.read_bytes()
    tensors = load(content)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    if WHOLE not in metadata:
        raise ValueError("it was written by an earlier version")
    whole = json.loads(metadata[WHOLE])
    if whole["crc32"] != _checksum(tensors, whole["state"]):
        raise ValueError("its checksum does not match its content")
    return RunCheckpoint(tensors, json.loads(whole["state"]))


def _checksum(tensors: dict[str, Tensor], state: str) -> int:
    value = zlib.crc32(state.encode())
    for name in sorted(tensors):
        content: Any = tensors[name].reshape(-1).view(torch.uint8).numpy()
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return value


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state as tensors by name and plain values by name."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, Tensor) else plain)[f"{index}.{name}"] = value
    return tensors, plain


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Load an optimizer's state; its settings come from the configuration."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **plain}.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def clear_damage(order: Order, note: Callable[[str], None]) -> None:
    """Remove the result of a finished run with damaged files, so that it runs again; call `note` with the reason.

    The metric stream and the result are rebuilt from the last checkpoint, at which the run ends again at once. Health
    readings exist nowhere else: if they are missing, or the files belong to another run, the run starts from its
    beginning.
    """
    damaged = order.damage()
    if not damaged:
        return
    files = order.files
    lost = (files.health.name, files.checkpoint.name, f"{files.result.name} is of")
    restarts = any(text.startswith(lost) for text in damaged)
    note(f"{order.folder}: {', '.join(damaged)}; the run is repeated{' from its start' if restarts else ''}")
    if restarts:
        # before the result: if this is interrupted, the run must still be seen as damaged
        drop_all(order.folder)
        files.health.unlink(missing_ok=True)
    files.result.unlink()
