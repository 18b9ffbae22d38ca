"""The runs of one world, a line each, in a CSV file: it is what a league resumes from, and what is kept of it."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

from headwise_papers.league.brief_run import Figures
from headwise_verdict.files.durable import append, write_bytes, write_json
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.ownership import claim

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

    Reading writes nothing. Raises StudyError if the folder has runs of another version of the world, and when
    something is to be written, if it has files that headwise did not write.
    """

    def __init__(self, folder: Path, digest: str | None = None) -> None:
        self.folder, self.runs = folder, dict[Run, Figures]()
        stored = _read_json(folder / WORLD_FILE)
        self.digest = digest or str(stored.get("digest", ""))
        self.notes = {name: str(why) for name, why in _pairs(stored, "notes").items()}
        self.facts = _pairs(stored, "facts")
        # the lines to begin with again, where a killed process left one without its end
        self._whole: str | None = None
        path = folder / FILE
        if not path.exists():
            return
        if stored.get("digest") != self.digest:
            raise StudyError(
                f"{folder} has runs of another version of this world (its code, data or settings changed): new runs "
                "would be no pairs of them. Choose another --out, or delete that folder."
            )
        lines = path.read_text(encoding="utf-8").split("\n")
        for row in csv.DictReader(lines[:-1]):
            train, validation, test = (float(row[name]) if row[name] else None for name in SPLITS)
            run = Run(row["arm"], float(row["rate"]), int(row["seed"]), row["eased"] == "1")
            self.runs[run] = Figures(train, validation, test, float(row["seconds"]))
        if lines[-1]:
            self._whole = "".join(f"{line}\n" for line in lines[:-1])

    def add(self, run: Run, figures: Figures) -> None:
        """Append a run; its figures count as they are written, so that a tie is one before and after a resumption."""
        train, validation, test = (
            None if one is None else float(f"{one:.6g}") for one in (figures.train, figures.validation, figures.test)
        )
        figures = Figures(train, validation, test, figures.seconds)
        path = self.folder / FILE
        if not path.exists():
            self.save()
        else:
            self._claim()
        if self._whole is not None:
            write_bytes(path, self._whole.encode())
            self._whole = None
        values = ["" if one is None else f"{one:.6g}" for one in (figures.train, figures.validation, figures.test)]
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        if not path.exists() or path.stat().st_size == 0:
            writer.writerow(COLUMNS)
        writer.writerow([int(run.eased), run.arm, run.rate, run.seed, *values, f"{figures.seconds:.2f}"])
        append(path, lines.getvalue().encode())
        self.runs[run] = figures

    def note(self, name: str, why: str) -> None:
        """Record why a contestant was refused or failed; it has no further run."""
        self.notes[name] = " ".join(why.split())
        self.save()

    def save(self) -> None:
        """Write the world's digest, notes and facts beside its runs."""
        self._claim()
        ordered = {"facts": dict(sorted(self.facts.items())), "notes": dict(sorted(self.notes.items()))}
        write_json(self.folder / WORLD_FILE, {"digest": self.digest, **ordered})

    def _claim(self) -> None:
        claim(self.folder, (FILE, WORLD_FILE))


def _pairs(stored: dict[str, object], name: str) -> dict[str, object]:
    found = stored.get(name, {})
    return dict(found) if isinstance(found, dict) else {}


def _read_json(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except ValueError as error:
        raise StudyError(f"{path} is not valid JSON ({error}). Delete its folder and run the world again.") from error
