"""Logs for the records of a watch: a file of JSON lines, TensorBoard, or the logger that a training already uses."""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headwise.files.arguments import is_a, is_path
from headwise.files.durable import append_lines
from headwise.files.user_warnings import warn
from headwise.health.health_records import Line, alerts_among
from headwise.health.watching.diagnosis import Incidents
from headwise.health.watching.loggers import logger_of
from headwise.health.watching.pictures import shown


class Log(ABC):
    """Destination for the records of a reading."""

    @abstractmethod
    def write(self, records: list[Line], step: int) -> None:
        """Write the records of one step; alerts are records with a field `alert`."""

    def close(self) -> None:
        """Finish writing; does nothing for most logs."""
        return


class JsonLines(Log):
    """Log that appends each record to a file as one line of JSON; NaN and infinity are written as null.

    The file is opened and closed for each reading, so that a killed run loses no reading. A reading that cannot be
    written completely, as on a full disk, is removed again, so that the file contains only complete lines.

    Raises:
        FileExistsError: if the file holds something other than such a log.

    Example:
        >>> import os, tempfile, torch, headwise
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     watch = headwise.watch(model, log=headwise.JsonLines(os.path.join(folder, "health.jsonl")))
        ...     x = torch.randn(4, 8, 16)
        ...     _ = model(x, x, x, need_weights=False)
        ...     watch.step()
        ...     os.listdir(folder)
        ['health.jsonl']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        is_path("path", path)
        self.path = Path(path)
        self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        """Raise FileExistsError if the file holds anything but a log, which appended lines would spoil."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            first = file.readline()
        if first and not _is_of_log(first):
            raise FileExistsError(f"{self.path} holds something other than a log of headwise.watch: give another path")

    def write(self, records: list[Line], step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self.path, records)

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def _is_of_log(first: bytes) -> bool:
    """Return whether the first line of a file is one of a log; a killed run may have left only its beginning."""
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return any(first.startswith(key) or key.startswith(first) for key in (b'{"site": ', b'{"alert": '))
    return isinstance(record, dict) and {"statistic", "step"} <= record.keys()


class Metrics(Log):
    """Log that passes layer means, heat maps of the heads and alerts to a logger; with `heads`, every head too."""

    def __init__(self, target: Any, heads: bool = False) -> None:
        logger = logger_of(target)
        if logger is None:
            raise TypeError(
                f"{target!r} is not a logger, it has neither log_metrics(dict, step) nor log(dict, step): pass an "
                "object that has one of them"
            )
        self.target, self.heads, self._logger = target, heads, logger
        # As many texts as there are kinds of trouble, and not one for each head; a watch sets its own cadence.
        self.incidents = Incidents()
        # Whether to log six figures only; set by `logs_of` for a watch without named statistics.
        self.brief = False

    def write(self, records: list[Line], step: int) -> None:
        summary, news = shown(records, self.heads, self.brief), self.incidents.add(alerts_among(records))
        self._logger.figures(summary.figures, step)
        try:
            if summary.maps:
                self._logger.maps(summary.maps, step)
        finally:
            # Pictures may need a library that is not installed; alerts are logged all the same.
            if news:
                self._logger.alerts(news, step)

    def __repr__(self) -> str:
        return f"Metrics({type(self.target).__name__})"


class TensorBoard(Metrics):
    """Log for a TensorBoard folder: layer means as scalars, heat maps of the heads as images, alerts as texts.

    Args:
        folder: the folder for the event files.
        heads: write every head as a scalar too.

    Raises:
        ImportError: if tensorboard is not installed.

    Example:
        >>> import tempfile, torch, headwise
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     watch = headwise.watch(model, log=headwise.TensorBoard(folder))
        ...     watch.remove()
    """

    def __init__(self, folder: str | os.PathLike[str], heads: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard logs need tensorboard: pip install 'headwise[tensorboard]'") from error
        is_path("folder", folder)
        is_a("heads", heads, bool, "True or False")
        self.folder = Path(folder)
        super().__init__(SummaryWriter(str(folder)), heads)

    def close(self) -> None:
        self.target.close()

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"


def logs_of(given: Any, heads: bool = False, brief: bool = False, every: int = 1) -> list[Log]:
    """Return logs for one or several `Log` objects, loggers, or paths of files of JSON lines.

    Args:
        given: the value of `log=`: one object, an iterable of such values, or None.
        heads: log every head too, in all of them.
        brief: log six figures only.
        every: the number of steps between readings, by which alerts are grouped.

    Raises:
        TypeError: if an object is none of these.
    """
    if given is None:
        return []
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return [log for item in given for log in logs_of(item, heads, brief, every)]
    if isinstance(given, str | os.PathLike):
        given = JsonLines(given)
    if not isinstance(given, Log):
        if logger_of(given) is None:
            raise TypeError(
                f"log={given!r} is not a log: pass the path of a file, TensorBoard(folder) or an object with "
                "log_metrics(dict, step) or log(dict, step), such as a wandb run, mlflow, trackio, a SummaryWriter, a "
                "Lightning logger or an Accelerator"
            )
        given = Metrics(given, heads)
    if isinstance(given, Metrics):
        given.heads, given.brief, given.incidents = given.heads or heads, brief, Incidents(every)
    return [given]


class Careful:
    """Group of logs whose failures are warned about, once for each log, and never stop the training."""

    def __init__(self, logs: list[Log]) -> None:
        self.logs = logs
        self._warned: set[int] = set()

    def write(self, records: list[Line], step: int) -> None:
        """Write to every log; warn when one fails for the first time, and try it again at later readings."""
        for log in self.logs:
            try:
                log.write(records, step)
            # Loggers raise anything, from OSError to errors of network clients; none of them may end a training.
            except Exception as error:
                if id(log) not in self._warned:
                    self._warned.add(id(log))
                    _warn(
                        f"{log!r} could not be written at step {step} ({type(error).__name__}: {error}); the training "
                        "continues"
                    )

    def close(self) -> None:
        """Close every log."""
        for log in self.logs:
            try:
                log.close()
            except Exception as error:
                _warn(f"{log!r} could not be closed ({type(error).__name__}: {error})")


def _warn(text: str) -> None:
    try:
        warn(text, RuntimeWarning)
    except RuntimeWarning:
        # A failing log must not stop the training even when warnings are turned into errors.
        logging.getLogger("headwise").warning(text)
