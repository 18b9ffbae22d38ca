"""Where records go: a file of JSON lines, TensorBoard, or anything with a `log(dict, step)`."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headwise.watching.records import Line, alerts_among, flat


class Log(ABC):
    """A place that takes the records of one reading."""

    @abstractmethod
    def write(self, records: list[Line], step: int) -> None:
        """Take the records of one step; alerts are records with a field `alert`."""

    def close(self) -> None:
        """Finish writing; most logs have nothing left to write."""
        return


class JsonLines(Log):
    """Appends each record as one line of JSON to a file; NaN and infinity are written as null.

    The file is opened for each reading, so that a run that is killed loses nothing that was read. A reading that could not be
    written to its end (a full disk) is taken back, so that the file holds whole lines alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, records: list[Line], step: int) -> None:
        lines = [json.dumps({k: _plain(v) for k, v in record.items()}, allow_nan=False) + "\n" for record in records]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer nothing is left to be written, and to fail again, when the file is closed.
        with self.path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END) if file.seekable() else 0
            try:
                _write_all(file, (_line_end(self.path, size) + "".join(lines)).encode())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def _write_all(file: io.FileIO, content: bytes) -> None:
    """Write all of it: a disk that runs full takes a part and says so at the next part alone."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _line_end(path: Path, size: int) -> str:
    """Give what ends the last line of a file, where a killed run left it open."""
    if not size:
        return ""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return "" if file.read(1) == b"\n" else "\n"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard(Log):
    """Writes each record as a scalar and each alert as a text to a TensorBoard folder.

    Raises:
        ImportError: where tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard logs need tensorboard: pip install 'headwise[tensorboard]'") from error
        self.folder = Path(folder)
        self._writer = SummaryWriter(str(folder))

    def write(self, records: list[Line], step: int) -> None:
        for name, value in flat(records).items():
            self._writer.add_scalar(name, value, step)
        for alert in alerts_among(records):
            self._writer.add_text(f"health/{alert['alert']}", f"{alert['sentence']}; {alert['remedy']}", step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"


class Metrics(Log):
    """Passes the figures on to `log(dict, step)` of wandb, trackio, an Accelerator or your own object.

    A wandb run gets them at the step it is at: it drops what is older, and a later step would move the axis of the user's own
    curves. The figure `health/step` holds the optimizer's step there.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._by_name = _takes_step_by_name(target.log)

    def write(self, records: list[Line], step: int) -> None:
        named = flat(records)
        alerts = alerts_among(records)
        if alerts:
            named["health/alerts"] = float(len(alerts))
        own = _own_step(self.target)
        if own is not None:
            named["health/step"] = float(step)
            step = own
        if self._by_name:
            self.target.log(named, step=step)
        else:
            self.target.log(named, step)

    def __repr__(self) -> str:
        return f"Metrics({type(self.target).__name__})"


def _own_step(target: Any) -> int | None:
    """Give the step a wandb run is at: the run itself, that of the module wandb, or one behind an Accelerator; else None."""
    runs = [target, getattr(target, "run", None)]
    runs += [getattr(tracker, "tracker", None) for tracker in getattr(target, "trackers", None) or ()]
    # By the class alone: a `step` of other objects counts other things, an Accelerator's its micro batches.
    ours = [run for run in runs if type(run).__module__.partition(".")[0] == "wandb"]
    return max((run.step for run in ours), default=None)


def _takes_step_by_name(log: Callable[..., Any]) -> bool:
    """Tell whether `step=` is a keyword of a `log`; some take it by keyword alone, some give it another name."""
    try:
        taken = inspect.signature(log).parameters.values()
    except (TypeError, ValueError):
        return True
    named = any(one.name == "step" and one.kind is not one.POSITIONAL_ONLY for one in taken)
    return named or any(one.kind is one.VAR_KEYWORD for one in taken)


def logs_of(given: Any) -> list[Log]:
    """Make logs of what a user gave: one or several of Log or of objects with `log(dict, step)`.

    Raises:
        TypeError: where an object is neither.
    """
    if given is None:
        return []
    several = given if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]
    made: list[Log] = []
    for item in several:
        if isinstance(item, Log):
            made.append(item)
        elif callable(getattr(item, "log", None)):
            made.append(Metrics(item))
        else:
            raise TypeError(
                f"a log is JsonLines(path), TensorBoard(folder) or an object with log(dict, step), such as a wandb run; got {item!r}"
            )
    return made


class Careful:
    """Writes to several logs; one that fails is told of once and never stops the training."""

    def __init__(self, logs: list[Log]) -> None:
        self.logs = logs
        self._told: set[int] = set()

    def write(self, records: list[Line], step: int) -> None:
        """Write to every log, warning the first time that one fails; later readings try again."""
        for log in self.logs:
            try:
                log.write(records, step)
            # Loggers raise anything, from OSError to errors of their network clients: none is worth a training run.
            except Exception as error:
                if id(log) not in self._told:
                    self._told.add(id(log))
                    _tell(
                        f"{log!r} could not be written at step {step} ({type(error).__name__}: {error}); the training goes on"
                    )

    def close(self) -> None:
        """Close every log."""
        for log in self.logs:
            try:
                log.close()
            except Exception as error:
                _tell(f"{log!r} could not be closed ({type(error).__name__}: {error})")


def _tell(text: str) -> None:
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    except RuntimeWarning:
        # Where warnings are errors, a log must not stop a training even so.
        logging.getLogger("headwise").warning(text)
