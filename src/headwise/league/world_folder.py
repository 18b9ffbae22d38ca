"""One world on disk: an ordinary folder of a study that grows by an arm an entry, and league.json, which says what each
search chose."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from headwise.files.durable import read_json, write_json
from headwise.files.errors import StudyError
from headwise.league.files import Entry, World
from headwise.results.records import Record

FILE = "league.json"
# of every entry, as a share of the plain model's step
STEP_TIMES = "step_times.json"


class Tried(Record):
    """Hold one trial: the arm, the learning rate, and what validation said; None where it diverged."""

    arm: str
    rate: float
    value: float | None


class EntryRecord(Record):
    """Hold how far an entry has come in a world.

    "refused": the model or the task cannot take it; "failed": a run of it ended with an error. Both are results.
    """

    kind: Literal["plain", "control", "method", "pair"]
    arm: str
    status: Literal["searching", "chosen", "refused", "failed"] = "searching"
    # of the arm as written, its ranges and the number of trials: others are another search
    digest: str
    chosen: str = ""
    rate: float | None = None
    validation: float | None = None
    tried: tuple[Tried, ...] = Field(default=(), strict=False)
    why: str = ""

    @property
    def over(self) -> bool:
        """Return whether no run of it will follow."""
        return self.status in ("refused", "failed")


class LeagueRecord(Record):
    """Hold what league.json says of a world."""

    world: str
    title: str
    symptom: str
    task: str
    settings: dict[str, Any]
    trials: int
    entries: dict[str, EntryRecord] = {}


def digest_of(entry: Entry, trials: int) -> str:
    """Return what tells one search of an entry from another: its arm, its ranges, and the number of trials."""
    text = json.dumps([entry.arm, entry.model_dump(mode="json")["search"], trials], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def begin(folder: Path, world: World, settings: dict[str, Any], trials: int) -> LeagueRecord:
    """Return what is known of a world, or a fresh record.

    Raises:
        StudyError: where the folder holds this world with other settings, another number of trials, or something else.
    """
    known = read_json(folder / FILE)
    fresh = LeagueRecord(
        world=world.name, title=world.title, symptom=world.symptom, task=world.task, settings=settings, trials=trials
    )
    if known is None:
        if (folder / "study.json").exists():
            raise StudyError(f"{folder} holds a study and no {FILE}: it is no world of a league. Choose another --out.")
        return fresh
    found = read(folder)
    for what in ("world", "task", "settings", "trials"):
        if getattr(found, what) != getattr(fresh, what):
            raise StudyError(
                f"{folder} holds the world {found.world} with other {what}: its entries would not be comparable with "
                f"new ones. Choose another --out, or delete {folder}."
            )
    return found.model_copy(update={"title": world.title, "symptom": world.symptom})


def read(folder: Path) -> LeagueRecord:
    """Return the record of a world; raise StudyError where the folder holds none."""
    known = read_json(folder / FILE)
    if known is None:
        raise StudyError(
            f"{folder} holds no {FILE}: it is no world of a league. Give the folders that `headwise league --run` "
            "wrote."
        )
    try:
        return LeagueRecord.model_validate(known)
    except ValueError as error:
        raise StudyError(
            f"{folder / FILE} does not hold what a league writes ({error}). Delete {folder} and run the world again."
        ) from error


def is_ready(folder: Path) -> bool:
    """Return whether a folder holds a world that can be read: the search of its plain model has ended."""
    return (folder / FILE).is_file() and (folder / "study.json").is_file()


def write(folder: Path, record: LeagueRecord) -> None:
    """Write the record of a world so that a stop leaves the old or the new one."""
    write_json(folder / FILE, record.model_dump(mode="json"))


def step_times(folder: Path) -> dict[str, float]:
    """Return the ratios that were measured in a world, by entry; none where none were."""
    found: Any = read_json(folder / STEP_TIMES)
    return {} if found is None else {str(name): float(ratio) for name, ratio in found.items()}
