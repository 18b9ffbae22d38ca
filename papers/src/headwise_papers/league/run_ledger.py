"""The runs of one world, a line each, in a CSV file: it is what a league resumes from, and what is kept of it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from headwise_papers.league.brief_run import Figures
from headwise_verdict.files.errors import StudyError

FILE, WORLD_FILE = "runs.csv", "world.json"
SPLITS = ("train", "validation", "test")
COLUMNS = ("eased", "arm", "rate", "seed", *SPLITS, "seconds")


@dataclass(frozen=True, order=True)
class Run:
    """One run of a world: an arm at a learning rate and a seed, of the world's task or of its eased one."""

    arm: str
    rate: float
    seed: int
    eased: bool = False


class Ledger:
    """All runs of one world so far; `folder` has them in `runs.csv`, one line appended after each run.

    Raises StudyError if the folder has runs of another version of the world.
    """

    def __init__(self, folder: Path, digest: str | None = None) -> None:
        self.folder, self.runs = folder, dict[Run, Figures]()
        stored = _read_json(folder / WORLD_FILE)
        self.digest = digest or str(stored.get("digest", ""))
        self.notes = {name: str(why) for name, why in _pairs(stored, "notes").items()}
        self.facts = _pairs(stored, "facts")
        path = folder / FILE
        if not path.exists():
            return
        if stored.get("digest") != self.digest:
            raise StudyError(
                f"{folder} has runs of another version of this world (its code, data or settings changed): new runs "
                "would be no pairs of them. Choose another --out, or delete that folder."
            )
        lines = path.read_text(encoding="utf-8").split("\n")
        if len(lines) < 2:
            path.unlink()
            return
        # a line that a killed process left without its end is run again
        for row in csv.DictReader(lines[:-1]):
            train, validation, test = (float(row[name]) if row[name] else None for name in SPLITS)
            run = Run(row["arm"], float(row["rate"]), int(row["seed"]), row["eased"] == "1")
            self.runs[run] = Figures(train, validation, test, float(row["seconds"]))
        if lines[-1]:
            path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")

    def add(self, run: Run, figures: Figures) -> None:
        """Append a run; its figures count as they are written, so that a tie is one before and after a resumption."""
        train, validation, test = (
            None if one is None else float(f"{one:.6g}") for one in (figures.train, figures.validation, figures.test)
        )
        figures = Figures(train, validation, test, figures.seconds)
        path, is_new = self.folder / FILE, not (self.folder / FILE).exists()
        if is_new:
            self.save()
        with path.open("a", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            if is_new:
                writer.writerow(COLUMNS)
            values = ["" if one is None else f"{one:.6g}" for one in (figures.train, figures.validation, figures.test)]
            writer.writerow([int(run.eased), run.arm, run.rate, run.seed, *values, f"{figures.seconds:.2f}"])
        self.runs[run] = figures

    def note(self, name: str, why: str) -> None:
        """Record why a contestant was refused or failed; it has no further run."""
        self.notes[name] = " ".join(why.split())
        self.save()

    def save(self) -> None:
        """Write the world's digest, notes and facts beside its runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"digest": self.digest, "notes": self.notes, "facts": self.facts}, indent=1, sort_keys=True)
        (self.folder / WORLD_FILE).write_text(text + "\n", encoding="utf-8")


def _pairs(stored: dict[str, object], name: str) -> dict[str, object]:
    found = stored.get(name, {})
    return dict(found) if isinstance(found, dict) else {}


def _read_json(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except ValueError as error:
        raise StudyError(f"{path} is not valid JSON ({error}). Delete its folder and run the world again.") from error
