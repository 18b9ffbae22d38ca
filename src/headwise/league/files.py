"""Entries and worlds: one TOML file each, of headwise's packages, of any installed package, or of a folder of one's
own."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headwise.core.settings import suggest
from headwise.experiments.task import Task
from headwise.experiments.task_source import build_task, load_task
from headwise.files.entry_points import entry_points
from headwise.files.errors import StudyError

RATE = "learning_rate"
GROUP: Literal["headwise.leagues"] = "headwise.leagues"


class Choices(BaseModel):
    """Hold the values among which a search chooses, where they are no range."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: tuple[bool | int | float | str, ...] = Field(min_length=2)


Axis = tuple[int, int] | tuple[float, float] | Choices


class Named(BaseModel):
    """Hold what entries and worlds have in common: the name, which is that of the file, and a reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    reason: str = Field(min_length=1, description="why these ranges, or these settings")


class Entry(Named):
    """Hold one entry: the arm as it is written, and what its search may choose.

    `search` names the learning rate, as factors of the world's own, and the entry's own strengths: fields of its
    methods ("p", or "DropHead.p" where several have one), or settings of the task that its arm changes.
    """

    arm: str
    kind: Literal["plain", "control", "method", "pair"]
    search: dict[str, Axis]
    # the only worlds in which it has a meaning; none: all
    worlds: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _can_be_searched(self) -> Entry:
        if RATE not in self.search:
            raise ValueError(f"search: every entry searches {RATE}; give its factors: {RATE} = [0.25, 4.0]")
        for name, axis in self.search.items():
            if not isinstance(axis, Choices) and not axis[0] < axis[1]:
                raise ValueError(f"search.{name}: a range rises, got {list(axis)}")
        rate = self.search[RATE]
        if isinstance(rate, Choices) or not rate[0] <= 1 <= rate[1] or rate[0] <= 0:
            raise ValueError(f"search.{RATE}: factors around 1, the world's own rate, got {rate}")
        return self


class World(Named):
    """Hold one world: an existing task with settings, at which a run takes some seconds of one core."""

    title: str
    # what the plain model suffers from here
    symptom: str
    task: str
    settings: dict[str, Any] = {}
    # of one run of the plain model on one core, as measured
    seconds: float = Field(gt=0)
    # a difference within it counts as none, in the unit of the outcome that decides
    margin: float | None = Field(default=None, gt=0)

    def built(self) -> Task:
        """Build the task of this world; raise StudyError where it or a setting does not exist."""
        try:
            return build_task(load_task(self.task), self.settings)
        except StudyError as error:
            raise StudyError(f"world {self.name}: {error}") from error


N = TypeVar("N", bound=Named)


def installed_folders() -> list[Path]:
    """Return the folders of installed packages that hold `entries/` and `worlds/`, by the entry points
    `headwise.leagues`."""
    found = []
    for point in entry_points(GROUP).values():
        module = importlib.import_module(point.value)
        found += [Path(place) for place in module.__path__]
    return found


def read_entries(folders: Sequence[Path]) -> dict[str, Entry]:
    """Read every entry of these folders by its name, the plain model first, then controls, then methods and pairs.

    Raises:
        StudyError: naming the file that is no entry, two files of one name or of one arm, and where no plain model is.
    """
    found = _read(folders, "entries", Entry)
    kinds = ("plain", "control", "method", "pair")
    ordered = sorted(found.values(), key=lambda entry: (kinds.index(entry.kind), entry.name))
    arms: dict[str, str] = {}
    for entry in ordered:
        other = arms.setdefault("".join(entry.arm.split()), entry.name)
        if other != entry.name:
            raise StudyError(
                f"the entries {other} and {entry.name} are one arm, {entry.arm}. Take one of the files away."
            )
    plain = [entry.name for entry in ordered if entry.kind == "plain"]
    if len(plain) != 1 or found[plain[0]].arm != "baseline":
        raise StudyError(
            f"a league has one plain entry, whose arm is 'baseline'; found {', '.join(plain) or 'none'}. "
            'Keep one entry with kind = "plain".'
        )
    return {entry.name: entry for entry in ordered}


def read_worlds(folders: Sequence[Path]) -> dict[str, World]:
    """Read every world of these folders by its name; raise StudyError naming the file that is none."""
    return _read(folders, "worlds", World)


def chosen(known: dict[str, N], asked: Sequence[str], option: str) -> dict[str, N]:
    """Return the entries or worlds that were asked for, all where none was; raise StudyError for a name that is
    none."""
    wrong = [name for name in asked if name not in known]
    if wrong:
        raise StudyError(
            f"{option} {wrong[0]}: there is none of this name.{suggest(wrong[0], list(known))} Known: "
            f"{', '.join(known)}."
        )
    return {name: one for name, one in known.items() if not asked or name in asked}


def _read(folders: Sequence[Path], part: str, kind: type[N]) -> dict[str, N]:
    places: dict[str, Path] = {}
    found: dict[str, N] = {}
    for path in (path for folder in folders for path in sorted((folder / part).glob("*.toml"))):
        name = path.stem.replace("_", "-")
        if name in places:
            raise StudyError(f"{places[name]} and {path} have one name, {name}. Rename one of them.")
        places[name] = path
        try:
            text = tomllib.loads(path.read_text(encoding="utf-8"))
            found[name] = kind.model_validate({"name": name, **text})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise StudyError(f"{path} is no TOML: {error}. Repair the file.") from error
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"]))
            told = wrong["msg"].removeprefix("Value error, ")
            raise StudyError(f"{path}: {f'{place}: ' if place else ''}{told}. Repair the file.") from error
    if not found:
        where = ", ".join(map(str, folders)) or "no folder (no installed package brings a league)"
        raise StudyError(
            f"there are no {part} in {where}. Install headwise-papers, or give a folder with entries/ and worlds/: "
            "--source FOLDER."
        )
    return found
