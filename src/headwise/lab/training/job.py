"""Orders to an engine: one run, and everything that a worker needs to carry it out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.lab.experiments.configuration import RunConfiguration
from headwise.lab.files.script_run import TOLD, read_told
from headwise_verdict import StudyError
from headwise_verdict.files import read_json, read_lines
from headwise_verdict.results import Divergence, RunFiles, RunResult

if TYPE_CHECKING:
    from headwise.lab.experiments.task import Task


@dataclass(frozen=True)
class Order:
    """An order for one run: its configuration, its folder, and what changes no number (data folder, watching)."""

    configuration: RunConfiguration
    folder: Path
    task_place: str
    data: Path | None = None
    watch: bool = False
    device: str = "cpu"
    # whether steps are captured as CUDA graphs: auto, on or off
    graphs: str = "auto"
    # whether the run has the processor to itself; otherwise its costs are indicative
    alone: bool = True
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Return the run's hash."""
        return self.configuration.identity

    @property
    def files(self) -> RunFiles:
        """Return the files of the run."""
        return RunFiles(self.folder)

    def result(self) -> RunResult | None:
        """Return the result, or None if the run is not finished or its files changed since it wrote them."""
        return self.files.read_result(self.identity)[0]

    def ended(self, metrics: dict[str, float | None], divergence: Divergence | None, **more: Any) -> RunResult:
        """Return the result of this run with its outcomes, its divergence if it diverged, and other fields."""
        origin = {name: self.environment.get(name) for name in ("commit", "versions", "hardware")}
        more = origin | more | ({"steps": divergence.step} if divergence else {})
        return RunResult(
            status="diverged" if divergence else "finished",
            arm=self.configuration.arm,
            seed=self.configuration.seed,
            hash=self.identity,
            metrics=metrics,
            divergence=divergence,
            cost_is_indicative=not self.alone,
            watched=self.watch,
            config=self.configuration.model_dump(mode="json"),
            **more,
        )

    def kept(self) -> int:
        """Return the number of epochs that are kept when this run is stopped."""
        return len(read_lines(self.files.metrics))

    def damage(self) -> list[str]:
        """Return what is wrong with the files of a finished run; empty if it is not finished."""
        return self.files.read_result(self.identity)[1]

    def task(self) -> Task:
        """Return the task of this run; raise StudyError if its file changed since the study started."""
        from headwise.lab.experiments.task_source import build_task, load_task, source_digest, source_file

        file = source_file(self.task_place)
        if file is not None and source_digest(file) != self.configuration.task_source:
            raise StudyError(f"{file} changed while the study runs. Start the command again to run the changed task.")
        return build_task(load_task(self.task_place), self.configuration.settings).located(self.data)


@dataclass(frozen=True)
class Rehearsal(Order):
    """An order to try arms before any run trains; `arms` holds the configuration of each."""

    arms: tuple[RunConfiguration, ...] = ()

    @property
    def identity(self) -> str:
        """Return a name that no run has."""
        return "rehearsal"


def is_first_process() -> bool:
    """Return whether this process writes the files; other processes of a distributed run only compute."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True)
class ScriptOrder(Order):
    """An order for one run of a script.

    `started_in` is the working folder of the command, `primary` the deciding outcome and `outcomes` the names of all
    requested ones. A script that prints and logs nothing for `timeout` seconds hangs. `environment_before` holds the
    original values of the variables that a worker changed for itself.
    """

    started_in: Path = Path()
    primary: str = ""
    outcomes: tuple[str, ...] = ()
    timeout: float | None = None
    environment_before: dict[str, str | None] = field(default_factory=dict)
    # whether the script is only tried: it is stopped after its third step
    tries: bool = False

    def kept(self) -> int:
        """Return the number of recorded lines: a stopped job that adds none makes no progress."""
        return sum(len(read_told(path)) for path in (self.folder / TOLD).glob("*.jsonl"))

    def attempts(self) -> list[Path]:
        """Return the files of the starts of this run, in their order."""
        paths = (self.folder / TOLD).glob("*.json")
        return sorted((path for path in paths if isinstance(read_json(path), dict)), key=lambda path: int(path.stem))
