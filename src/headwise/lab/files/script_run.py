"""A running script's side of a study: the file of its run, and the stream to which it reports.

The module is light to import: a script that does not train with torch needs nothing else. `HEADWISE_RUN` names the file
that the study wrote for this attempt. The stream is next to it, one for each attempt, so that late lines of an earlier
process change nothing.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from headwise.files.durable import append_lines
from headwise_verdict import StudyError
from headwise_verdict.files import read_json, read_lines

VARIABLE = "HEADWISE_RUN"
TOLD = "told"


class Told:
    """The report of a script about its run to the study; outside a study, nothing is written."""

    def __init__(self, place: str | None) -> None:
        self.path = Path(place) if place else None
        self.terms: dict[str, Any] = {}
        self.recorded: dict[str, dict[str, float]] = {}
        if self.path is not None:
            terms = read_json(self.path)
            if not isinstance(terms, dict):
                raise StudyError(
                    f"{VARIABLE}={place} is not the file of a study's run. `headwise compare --script` sets it: unset "
                    "it to run alone."
                )
            self.terms = terms

    @property
    def writes(self) -> bool:
        """Return whether this process reports: in a study, the first process of a distributed run does."""
        return self.path is not None and is_first()

    def tell(self, what: str, **values: Any) -> None:
        """Append a line to the stream, with the time of this machine's clock in seconds."""
        if self.writes:
            assert self.path is not None
            append_lines(self.path.with_suffix(".jsonl"), [{"told": what, "at": round(time.time(), 4), **values}])

    def record(self, split: str, figures: dict[str, Any]) -> None:
        """Record outcomes of a split, once.

        Raises:
            ValueError: if there are none, a split is recorded twice, or a figure is not a finite number.
        """
        if not figures:
            raise ValueError("run.record() got no figures. Write run.record(accuracy=0.91).")
        if "/" in split or not split:
            raise ValueError(f'run.record(split={split!r}): a split is one word, such as "test" or "validation".')
        numbers = {name: _number(name, value) for name, value in figures.items()}
        twice = sorted(numbers.keys() & self.recorded.get(split, {}).keys())
        if twice:
            raise ValueError(
                f"run.record({twice[0]}=...) of {split!r} was called twice. A run is judged once: record when the "
                "training has ended."
            )
        self.recorded.setdefault(split, {}).update(numbers)
        self.tell("record", split=split, figures=numbers)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Add a point to the curves; a loss that is not finite is a divergence.

        Raises:
            ValueError: if the step is not a whole number, or a figure is not a number.
        """
        try:
            number = int(step)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"run.log(step={step!r}): the step must be a whole number. Pass the optimizer step, counted from 1: "
                "run.log(step=1, loss=0.7)."
            ) from error
        self.tell("log", step=number, figures={name: _text(name, value) for name, value in figures.items()})


def is_first() -> bool:
    """Return whether this is the first of the processes that train together, with any launcher."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if os.environ.get(name, "").isdigit():
            return os.environ[name] == "0"
    # srun numbers its tasks; a job of one task is 0
    number = os.environ.get("SLURM_PROCID", "")
    return not number.isdigit() or number == "0"


def read_told(path: Path) -> list[dict[str, Any]]:
    """Return the records of a stream, without torn ones."""
    return [record for record in read_lines(path) if "told" in record]


def _float(call: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"run.{call}({name}=...) got {type(value).__name__}, which is not a number. Pass one figure."
        ) from error


def _number(name: str, value: Any) -> float:
    number = _float("record", name, value)
    if not math.isfinite(number):
        raise ValueError(
            f"run.record({name}={number}) cannot be compared. If the training diverged, log its loss: "
            "run.log(step=..., loss=...)."
        )
    return number


def _text(name: str, value: Any) -> float | str:
    number = _float("log", name, value)
    # JSON holds no NaN
    return number if math.isfinite(number) else str(number)


_current: list[Told] = []


def current() -> Told:
    """Return the run of this process, always the same object."""
    if not _current:
        _current.append(Told(os.environ.get(VARIABLE)))
    return _current[0]
