"""What is asked of an engine: one run, and everything a worker needs to carry it out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.comparing.results.digests import damage
from headwise.comparing.run.configuration import RunConfiguration
from headwise.files.durable import read_json
from headwise.files.errors import StudyError

if TYPE_CHECKING:
    from headwise.comparing.task import Task

# how a run ends
ENDS = ("finished", "diverged")


@dataclass(frozen=True)
class Order:
    """Ask for one run: its configuration, where it lives, and what changes no number (data folder, watching)."""

    configuration: RunConfiguration
    folder: Path
    task_place: str
    data: Path | None = None
    watch: bool = False
    device: str = "cpu"
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Give the run's hash."""
        return self.configuration.identity

    def result(self) -> dict[str, Any] | None:
        """Read the result, or None when the run is not finished or its files are no longer what it wrote."""
        found = self._written()
        return None if found is None or damage(self.folder, found) else found

    def damage(self) -> list[str]:
        """Name the files of a finished run that are no longer what it wrote; empty for one that is not finished."""
        found = self._written()
        return [] if found is None else damage(self.folder, found)

    def _written(self) -> dict[str, Any] | None:
        # what is no result of this run counts for nothing
        found = read_json(self.folder / "result.json")
        whole = isinstance(found, dict) and found.get("hash") == self.identity and found.get("status") in ENDS
        return found if whole and isinstance(found.get("metrics"), dict) else None

    def task(self) -> Task:
        """Build the task of this run, refusing a task file that changed since the study started."""
        from headwise.comparing.task import build_task, load_task, source_digest

        file, _, _ = self.task_place.rpartition(":")
        if self.configuration.task_source is not None and source_digest(Path(file)) != self.configuration.task_source:
            raise StudyError(f"{file} changed while the study runs. Start the command again to run the changed task.")
        return build_task(load_task(self.task_place), self.configuration.settings).located(self.data)


def is_first_process() -> bool:
    """Tell whether this process writes the files; the others of a distributed run only compute."""
    return int(os.environ.get("RANK", "0")) == 0
