"""One world on disk: a study's folder that gains one arm per entry, and league.json with the searches' results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from headwise_papers.league.files import Entry, World
from headwise_verdict.files.durable import read_json, write_json
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.foreign_text import printable
from headwise_verdict.results.records import Record
from headwise_verdict.results.stored import checked_study

FILE = "league.json"
# the subfolders of a world with its runs on fresh seeds, and with its pairs of methods
FRESH, PAIRS = "fresh", "pairs"
# the file with the time of a step of every entry, as a ratio to the plain model's
STEP_TIMES = "step_times.json"


class Tried(Record):
    """One trial: the arm, the learning rate, and the figure on validation data, None if the run diverged."""

    arm: str
    rate: float
    value: float | None


class EntryRecord(Record):
    """The state of an entry in a world.

    "refused": the model or the task does not support it; "failed": one of its runs ended with an error. Both are final
    results.
    """

    kind: Literal["plain", "control", "method", "pair"]
    arm: str
    status: Literal["searching", "chosen", "refused", "failed"] = "searching"
    # of the arm as written, its ranges and the number of trials: a change of any of them is another search
    digest: str
    chosen: str = ""
    rate: float | None = None
    validation: float | None = None
    tried: tuple[Tried, ...] = Field(default=(), strict=False)
    why: str = ""
    # of a pair: the digests of its two parts
    parts: dict[str, str] = {}

    @property
    def over(self) -> bool:
        """Return whether no further run of the entry will follow."""
        return self.status in ("refused", "failed")


class LeagueRecord(Record):
    """The content of a world's league.json."""

    world: str
    title: str
    symptom: str
    task: str
    # SHA-256 of the task's file, of which the identity of each run is made; None in records that do not tell it
    source: str | None = None
    settings: dict[str, Any]
    trials: int
    entries: dict[str, EntryRecord] = {}


def check_seeds(folder: Path, seeds: range) -> None:
    """Raise StudyError if the final runs of a world are on other seeds, or its fresh seeds would not be fresh."""
    stored, fresh = (_seeds_of(place) for place in (folder, folder / FRESH))
    if not set(stored) <= set(seeds):
        raise StudyError(
            f"{folder} contains final runs on seeds {min(stored)} to {max(stored)}, and --seeds {len(seeds)} would "
            f"leave some of them out. Give --seeds {len(stored)}, or choose another --out."
        )
    if set(fresh) & set(seeds):
        raise StudyError(
            f"{folder / FRESH} contains runs on seeds {min(fresh)} to {max(fresh)}, which would not be fresh with "
            f"--seeds {len(seeds)}. Give fewer seeds, or delete that folder and run --fresh again."
        )


def _seeds_of(folder: Path) -> list[int]:
    path = folder / "study.json"
    return checked_study(path).seeds if path.is_file() else []


def digest_of(entry: Entry, trials: int) -> str:
    """Return the digest that identifies a search of an entry: of its arm, its ranges, and the number of trials."""
    text = json.dumps([entry.arm, entry.model_dump(mode="json")["search"], trials], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def begin(
    folder: Path,
    world: World,
    settings: dict[str, Any],
    trials: int,
    source: str | None = None,
    record: LeagueRecord | None = None,
) -> LeagueRecord:
    """Return the stored record of a world, or a new one; `source` is the SHA-256 of the task's file.

    `record`: the record of a published world, which is checked and used in place of what the folder contains.

    Raises:
        StudyError: if the folder contains this world with other settings, another number of trials or another version
            of the task's file, or other content.
    """
    stored = read_json(folder / FILE)
    fresh = LeagueRecord(
        world=world.name,
        title=world.title,
        symptom=world.symptom,
        task=world.task,
        source=source,
        settings=settings,
        trials=trials,
    )
    if stored is None and record is None:
        if (folder / "study.json").exists():
            raise StudyError(
                f"{folder} contains a study but no {FILE}: it is not a world of a league. Choose another --out."
            )
        return fresh
    record = record or read(folder)
    for field in ("world", "task", "settings", "trials"):
        if getattr(record, field) != getattr(fresh, field):
            raise StudyError(
                f"{folder} contains the world {record.world} with other {field}: its entries would not be comparable "
                f"with new ones. Choose another --out, or delete {folder}."
            )
    if record.source is not None and record.source != source:
        raise StudyError(
            f"{folder} was run with another version of the file of {world.task}: new runs would not be pairs of its "
            "runs. Restore that version of the file, or choose another --out."
        )
    return record.model_copy(update={"title": world.title, "symptom": world.symptom, "source": source})


def read(folder: Path) -> LeagueRecord:
    """Return the record of a world; raise StudyError if the folder contains none."""
    stored = read_json(folder / FILE)
    if stored is None:
        raise StudyError(
            f"{folder} contains no {FILE}: it is not a world of a league. Give the folders that `headwise league "
            "--run` wrote."
        )
    try:
        return LeagueRecord.model_validate(printable(stored))
    except ValueError as error:
        raise StudyError(
            f"{folder / FILE} is not a valid record of a league ({error}). Delete {folder} and run the world again."
        ) from error


def is_ready(folder: Path) -> bool:
    """Return whether a folder contains a readable world: the search of its plain model has ended."""
    return (folder / FILE).is_file() and (folder / "study.json").is_file()


def why_not_ready(folder: Path) -> str:
    """Return why a folder with a league.json is not readable, and what to do about it."""
    plain = next((one for one in read(folder).entries.values() if one.kind == "plain"), None)
    if plain is None or plain.status == "searching":
        return "the search of its plain model has not ended. Resume the league: headwise league --run."
    if plain.status == "chosen":
        return "its searches are there and its final runs are not. Run them: headwise league --run."
    return f"its plain model {plain.status} ({plain.why}). Run it again: headwise league --run --again."


def write(folder: Path, record: LeagueRecord) -> None:
    """Write the record of a world atomically."""
    write_json(folder / FILE, record.model_dump(mode="json"))


def step_times(folder: Path) -> dict[str, float]:
    """Return the measured ratios of step times by entry; empty if none were measured."""
    ratios: Any = read_json(folder / STEP_TIMES)
    if ratios is None:
        return {}
    try:
        return {printable(name): float(ratio) for name, ratio in ratios.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise StudyError(
            f"{folder / STEP_TIMES} holds no step times by entry ({error}). Delete it and measure again: headwise "
            "league --time."
        ) from error
