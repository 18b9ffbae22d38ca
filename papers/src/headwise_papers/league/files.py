"""Entries and worlds: one TOML file each, from headwise's packages, any installed package, or a user's folder."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headwise.files.entry_points import entry_points
from headwise.files.errors import suggest
from headwise.lab.experiments.task import Task
from headwise.lab.experiments.task_source import build_task, load_task
from headwise_verdict.files.errors import StudyError

RATE = "learning_rate"
GROUP: Literal["headwise.leagues"] = "headwise.leagues"


class Choices(BaseModel):
    """A list of values from which a search chooses, in place of a range."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: tuple[bool | int | float | str, ...] = Field(min_length=2)


Axis = tuple[int, int] | tuple[float, float] | Choices


class Named(BaseModel):
    """The common fields of entries and worlds: a name, which is the file's, and a reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    reason: str = Field(min_length=1, description="why these ranges, or these settings")


class Entry(Named):
    """One entry: the arm as written, and the ranges of its search.

    `search` has the learning rate, as factors of the world's own, and the entry's own strengths: fields of its methods
    ("p", or "DropHead.p" if several methods have one), or settings of the task that its arm changes.
    """

    arm: str
    kind: Literal["plain", "control", "method", "pair"]
    search: dict[str, Axis]
    # the only worlds in which the entry is run; empty: all
    worlds: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _can_be_searched(self) -> Entry:
        if RATE not in self.search:
            raise ValueError(f"search: every entry searches {RATE}; give its factors: {RATE} = [0.25, 4.0]")
        for name, axis in self.search.items():
            if not isinstance(axis, Choices) and not axis[0] < axis[1]:
                raise ValueError(f"search.{name}: a range needs its lower end first, got {list(axis)}")
        rate = self.search[RATE]
        if isinstance(rate, Choices) or not rate[0] <= 1 <= rate[1] or rate[0] <= 0:
            raise ValueError(f"search.{RATE}: factors around 1, the world's own rate, got {rate}")
        return self


class World(Named):
    """One world: an existing task with settings that make a run take some seconds on one core."""

    title: str
    # the weakness of the plain model in this world
    symptom: str
    task: str
    settings: dict[str, Any] = {}
    # measured duration of one run of the plain model on one core
    seconds: float = Field(gt=0)
    # a smaller difference counts as none; in the unit of the primary outcome
    margin: float | None = Field(default=None, gt=0)

    def built(self) -> Task:
        """Return the task of this world; raise StudyError if the task or a setting does not exist."""
        try:
            return build_task(load_task(self.task), self.settings)
        except StudyError as error:
            raise StudyError(f"world {self.name}: {error}") from error


N = TypeVar("N", bound=Named)


def installed_folders() -> list[Path]:
    """Return the folders with `entries/` and `worlds/` that installed packages name as `headwise.leagues`."""
    folders = []
    for point in entry_points(GROUP).values():
        module = importlib.import_module(point.value)
        folders += [Path(place) for place in module.__path__]
    return folders


def read_entries(folders: Sequence[Path]) -> dict[str, Entry]:
    """Return every entry of these folders by name: the plain model first, then controls and methods.

    Raises:
        StudyError: for an invalid file, for two files with the same name or arm, for the file of a pair, and if the
            plain model is missing.
    """
    entries = _read(folders, "entries", Entry)
    pair = next((name for name, entry in entries.items() if entry.kind == "pair"), None)
    if pair is not None:
        raise StudyError(
            f"{pair} is a pair. Pairs need no file: --run --pairs 5 makes them of the highest entries, and compares "
            'each with its parts. Delete the file, or give it kind = "method".'
        )
    kinds = ("plain", "control", "method")
    ordered = sorted(entries.values(), key=lambda entry: (kinds.index(entry.kind), entry.name))
    arms: dict[str, str] = {}
    for entry in ordered:
        other = arms.setdefault("".join(entry.arm.split()), entry.name)
        if other != entry.name:
            raise StudyError(
                f"the entries {other} and {entry.name} are one arm, {entry.arm}. Take one of the files away."
            )
    plain = [entry.name for entry in ordered if entry.kind == "plain"]
    if len(plain) != 1 or entries[plain[0]].arm != "baseline":
        raise StudyError(
            f"a league has one plain entry, whose arm is 'baseline'; found {', '.join(plain) or 'none'}. "
            'Keep one entry with kind = "plain".'
        )
    return {entry.name: entry for entry in ordered}


def read_worlds(folders: Sequence[Path]) -> dict[str, World]:
    """Return every world of these folders by name; raise StudyError naming an invalid file."""
    return _read(folders, "worlds", World)


def chosen(known: dict[str, N], requested: Sequence[str], option: str) -> dict[str, N]:
    """Return the requested entries or worlds, all if none is requested; raise StudyError for an unknown name."""
    unknown = [name for name in requested if name not in known]
    if unknown:
        raise StudyError(
            f"{option} {unknown[0]}: unknown name.{suggest(unknown[0], list(known))} Known: {', '.join(known)}."
        )
    return {name: one for name, one in known.items() if not requested or name in requested}


def _located(text: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a world's text with the path of its task's file, which may be relative to the source folder."""
    place, colon, name = str(text.get("task", "")).rpartition(":")
    beside = path.parent.parent / place
    if place.endswith(".py") and not Path(place).is_absolute() and not Path(place).exists() and beside.exists():
        return text | {"task": f"{beside}{colon}{name}"}
    return text


def check_sources(folders: Sequence[Path]) -> None:
    """Raise StudyError for a folder of the user without `entries/` and `worlds/`."""
    for folder in folders:
        if not any((folder / part).is_dir() for part in ("entries", "worlds")):
            raise StudyError(
                f"--source {folder} contains neither entries/ nor worlds/. Give the folder that contains them."
            )


def _read(folders: Sequence[Path], part: str, kind: type[N]) -> dict[str, N]:
    places: dict[str, Path] = {}
    read: dict[str, N] = {}
    for path in (path for folder in folders for path in sorted((folder / part).glob("*.toml"))):
        name = path.stem.replace("_", "-")
        if name in places:
            raise StudyError(f"{places[name]} and {path} have one name, {name}. Rename one of them.")
        places[name] = path
        try:
            text = _located(tomllib.loads(path.read_text(encoding="utf-8")), path)
            read[name] = kind.model_validate({"name": name, **text})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise StudyError(f"{path} is not valid TOML: {error}. Repair the file.") from error
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            message = problem["msg"].removeprefix("Value error, ")
            raise StudyError(f"{path}: {f'{place}: ' if place else ''}{message}. Repair the file.") from error
    if not read:
        searched = ", ".join(map(str, folders)) or "no folder (no installed package brings a league)"
        raise StudyError(
            f"there are no {part} in {searched}. Install headwise-papers, or give a folder with entries/ and worlds/: "
            "--source FOLDER."
        )
    return read
