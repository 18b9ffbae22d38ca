"""What is asked of an engine: one run, and everything a worker needs to carry it out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headwise.comparing.results.digests import damage
from headwise.comparing.results.records import RunResult
from headwise.comparing.run.configuration import RunConfiguration
from headwise.files.durable import read_json
from headwise.files.errors import StudyError

if TYPE_CHECKING:
    from headwise.comparing.task import Task


@dataclass(frozen=True)
class Order:
    """Ask for one run: its configuration, where it lives, and what changes no number (data folder, watching)."""

    configuration: RunConfiguration
    folder: Path
    task_place: str
    data: Path | None = None
    watch: bool = False
    device: str = "cpu"
    # whether no other run shares the processor: else its costs are indicative
    alone: bool = True
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Give the run's hash."""
        return self.configuration.identity

    def result(self) -> RunResult | None:
        """Read the result, or None when the run is not finished or its files are no longer what it wrote."""
        found = self._written()
        return None if found is None or damage(self.folder, found.digests) else found

    def damage(self) -> list[str]:
        """Name the files of a finished run that are no longer what it wrote; empty for one that is not finished."""
        found = self._written()
        return [] if found is None else damage(self.folder, found.digests)

    def _written(self) -> RunResult | None:
        # what is no result of this run counts for nothing
        try:
            found = RunResult.model_validate(read_json(self.folder / "result.json"))
        except ValidationError:
            return None
        return found if found.hash == self.identity else None

    def task(self) -> Task:
        """Build the task of this run, refusing a task file that changed since the study started."""
        from headwise.comparing.task_place import source_file
        from headwise.comparing.task_source import build_task, load_task, source_digest

        file = source_file(self.task_place)
        if file is not None and source_digest(file) != self.configuration.task_source:
            raise StudyError(f"{file} changed while the study runs. Start the command again to run the changed task.")
        return build_task(load_task(self.task_place), self.configuration.settings).located(self.data)


@dataclass(frozen=True)
class Rehearsal(Order):
    """Ask that arms be tried before any run trains; `arms` holds a configuration of each."""

    arms: tuple[RunConfiguration, ...] = ()

    @property
    def identity(self) -> str:
        """Give what no run is called."""
        return "rehearsal"


def is_first_process() -> bool:
    """Tell whether this process writes the files; the others of a distributed run only compute."""
    return int(os.environ.get("RANK", "0")) == 0
