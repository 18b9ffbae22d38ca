"""Contestants and small worlds: one TOML file each, from installed packages or a user's own folder."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.task import Task
from headwise.lab.experiments.task_source import build_task, file_digests, load_task
from headwise_papers.league.code_digest import code_digest
from headwise_verdict.files.errors import StudyError

PLAIN = "plain"
ARMS, WORLDS = "arms", "small_worlds"
Symptom = Literal["memorising", "few examples", "too little training", "unstable training", "depth"]
SYMPTOMS: tuple[Symptom, ...] = ("memorising", "few examples", "too little training", "unstable training", "depth")
# the grid of rates: factors of the usual rate, four to a decade, nine over two decades
STEPS_A_DECADE, LOWEST, HIGHEST = 4, -4, 4


class Contestant(BaseModel):
    """A method or control: its arm at each strength that is tried, the source's own first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["plain", "control", "method"]
    arms: tuple[str, ...] = Field(min_length=1, max_length=4)
    # whether it changes what a learning rate means, so that the grid times ten is searched as well
    reparametrizes: bool = False
    reason: str = Field(min_length=1)


class SmallWorld(BaseModel):
    """A task with settings in which the plain model suffers from one symptom, and what would weaken the symptom."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    symptom: Symptom
    field: Literal["images", "text", "speech", "tables", "sequences"]
    architecture: str
    task: str
    # the data set beyond what is installed; "" if none
    needs: str = ""
    # the rate that most would take: the centre of the grid
    usual_rate: float = Field(0.001, gt=0)
    settings: dict[str, Any] = {}
    # changed settings under which the symptom must be weaker: twice the data, twice the steps, fewer layers
    eased: dict[str, Any] = {}
    # measured core-seconds of a run
    seconds: float = Field(gt=0)
    reason: str = Field(min_length=1)

    def built(self, folder: Path | None = None, *, eased: bool = False) -> Task:
        """Return the task, or the eased one; raise StudyError if a setting does not exist."""
        try:
            return build_task(load_task(self.task), self.settings | (self.eased if eased else {})).located(folder)
        except StudyError as error:
            raise StudyError(f"world {self.name}: {error}") from error

    def digest(self, folder: Path | None = None) -> str:
        """Return the 12 digits that identify a world: its code, data and settings, but no path and no comment."""
        task = self.built(folder)
        settings = [self.built(folder, eased=eased).model_dump(mode="json") for eased in (False, True)]
        text = json.dumps([code_digest(type(task)), file_digests(task), settings, self.usual_rate], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def rates(world: SmallWorld, *, wide: bool = False, halved: bool = False) -> list[float]:
    """Return a world's grid of learning rates in rising order.

    `wide` adds the grid times ten, for contestants that reparametrize; `halved` halves the steps: twice the search.
    """
    parts = STEPS_A_DECADE * (2 if halved else 1)
    scale = 2 if halved else 1
    last = HIGHEST + (STEPS_A_DECADE if wide else 0)
    return [rate_at(world, at / parts) for at in range(LOWEST * scale, last * scale + 1)]


def rate_at(world: SmallWorld, decades: float) -> float:
    """Return the rate that is `decades` above the usual one, with three digits."""
    return float(f"{world.usual_rate * 10**decades:.3g}")


def read_contestants(folders: Sequence[Path]) -> dict[str, Contestant]:
    """Return all contestants by name, the plain model first, then controls, then methods.

    Raises:
        StudyError: for an invalid file, two files of one name, or without exactly one plain model.
    """
    read = _read(folders, ARMS, Contestant)
    if [one.arms for one in read.values() if one.kind == PLAIN] != [("baseline",)]:
        raise StudyError('a league has one contestant of kind "plain", with arms = ["baseline"]')
    kinds = (PLAIN, "control", "method")
    return {one.name: one for one in sorted(read.values(), key=lambda one: (kinds.index(one.kind), one.name))}


def read_small_worlds(folders: Sequence[Path]) -> dict[str, SmallWorld]:
    """Return all worlds by name, by symptom; raise StudyError for an invalid file or two files of one name."""
    read = _read(folders, WORLDS, SmallWorld)
    return {one.name: one for one in sorted(read.values(), key=lambda one: (SYMPTOMS.index(one.symptom), one.name))}


def why_refused(contestant: Contestant, task: Task) -> str:
    """Return why a task does not take a contestant's arms; "" if it does."""
    try:
        for arm in contestant.arms:
            read_arm(arm, task).task(task)
    except (StudyError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def _read(folders: Sequence[Path], part: str, kind: Any) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for path in (path for folder in folders for path in sorted((folder / part).glob("*.toml"))):
        name = path.stem.replace("_", "-")
        if name in read:
            raise StudyError(f"{path}: there is another file of this name. Rename one of them.")
        try:
            text = tomllib.loads(path.read_text(encoding="utf-8"))
            place = str(text.get("task", "")).rpartition(":")[0]
            if place.endswith(".py") and (folder_file := path.parent.parent / place).exists():
                text["task"] = f"{folder_file}:{text['task'].rpartition(':')[2]}"
            read[name] = kind.model_validate({"name": name, **text})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise StudyError(f"{path} is not valid TOML: {error}. Repair the file.") from error
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise StudyError(f"{path}: {place}: {problem['msg']}. Repair the file.") from error
    return read
