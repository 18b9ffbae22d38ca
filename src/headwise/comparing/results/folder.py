"""Read a study's folder: what was asked for, every run's state, its epochs and its health records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headwise.comparing.results.records import checked_config, checked_result, checked_study, read_epochs
from headwise.watching.health_file import read_health
from headwise.watching.records import Line


@dataclass(frozen=True)
class RunFolder:
    """Holds one run as found on disk; `result` is None until the run has finished or diverged."""

    method: str
    seed: int
    path: Path
    result: dict | None

    @property
    def status(self) -> str:
        """Return "finished", "diverged" or "unfinished"."""
        return self.result["status"] if self.result else "unfinished"

    def metric(self, name: str) -> float | None:
        """Return a figure of a finished run, or None when the run did not finish or the figure is absent or not finite."""
        if self.status != "finished":
            return None
        value = self.result.get("metrics", {}).get(name)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    @property
    def watched(self) -> bool:
        """Return whether the health of the heads was recorded; a result of an older version does not say it itself."""
        return bool((self.result or {}).get("watched", (self.path / "health.jsonl").is_file()))

    def epochs(self) -> list[dict]:
        """Return the lines of metrics.jsonl, one an epoch."""
        return read_epochs(self.path / "metrics.jsonl")

    def health(self) -> list[Line]:
        """Return the lines of health.jsonl: readings and alerts; empty when the run was not watched.

        A run that was killed leaves a torn line and, resumed, reads some steps again: the later record stands.
        """
        records = read_health(self.path / "health.jsonl")
        named = ("alert", "statistic", "site", "head", "group", "step")
        return list({tuple(record.get(name) for name in named): record for record in records}.values())


@dataclass(frozen=True)
class StudyFolder:
    """Holds a study as found on disk: its description and the runs by (method, seed)."""

    path: Path
    study: dict
    runs: dict[tuple[str, int], RunFolder]

    @property
    def methods(self) -> list[str]:
        """Return the labels in the order of the study, the baseline first."""
        return self.study["methods"]

    @property
    def baseline(self) -> str:
        """Return the label that all others are compared to."""
        return self.study["baseline"]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds that the study asks for."""
        return self.study["seeds"]

    def of(self, method: str) -> list[RunFolder]:
        """Return the runs of a method that exist on disk, in the order of the seeds."""
        return [self.runs[method, seed] for seed in self.seeds if (method, seed) in self.runs]

    def missing(self) -> list[tuple[str, int]]:
        """Return the (method, seed) pairs without a result."""
        cells = [(method, seed) for method in self.methods for seed in self.seeds]
        return [cell for cell in cells if cell not in self.runs or self.runs[cell].result is None]


def read_study(folder) -> StudyFolder:
    """Return the study in `folder`.

    Raises FileNotFoundError without a study.json, ValueError for a file that is not JSON or does not hold what it should, for a study
    whose baseline is not among its methods, and for two results of the same method and seed.
    """
    path = Path(folder)
    if not (path / "study.json").is_file():
        raise FileNotFoundError(
            f"{path} holds no study.json, so it is not the folder of a study. Give the folder named by --out."
        )
    study = checked_study(path / "study.json")
    if study["baseline"] not in study["methods"]:
        raise ValueError(
            f"{path / 'study.json'}: the baseline {study['baseline']!r} is not among the methods {study['methods']}."
        )
    return StudyFolder(path, study, _runs(path, study))


def _runs(path: Path, study: dict) -> dict[tuple[str, int], RunFolder]:
    # study.json names its runs by hash: what an earlier configuration left in the folder is not part of this study.
    named = study.get("runs")
    hashes = {entry["hash"] if isinstance(entry, dict) else entry for entry in named} if named else None
    found: dict[tuple[str, int], RunFolder] = {}
    for folder in sorted((path / "runs").glob("*")):
        if not (folder / "config.json").is_file() or (hashes is not None and folder.name not in hashes):
            continue
        config = checked_config(folder / "config.json")
        if config.get("purpose", "final") != "final":
            continue
        result = checked_result(folder / "result.json") if (folder / "result.json").is_file() else None
        run = RunFolder(config["method"], config["seed"], folder, result)
        _add(found, run)
    return found


def _add(found: dict, run: RunFolder) -> None:
    cell = (run.method, run.seed)
    other = found.get(cell)
    if other is not None and other.result and run.result:
        raise ValueError(
            f"{other.path} and {run.path} both hold a result of {run.method} with seed {run.seed}: their configurations differ. "
            "Move the one that does not belong to this study away."
        )
    if other is None or run.result:
        found[cell] = run
