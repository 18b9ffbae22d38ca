"""Read finished worlds: what every entry gained, against the plain model and against the best control."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.files.errors import StudyError
from headwise.league import world_folder
from headwise.league.gains import Figures
from headwise.league.world_folder import EntryRecord, LeagueRecord, step_times
from headwise.results.analysis_record import Difference
from headwise.results.differences import paired_differences
from headwise.results.folder import StudyFolder, read_study
from headwise.results.records import Outcome

if TYPE_CHECKING:
    from headwise.league.gains import Array

STEP = "cost/seconds_per_step"
# the mean over the heads of a model
HEADS = re.compile(r"heads/[^/]+/mean")


@dataclasses.dataclass(frozen=True)
class Cell:
    """Hold what is known of an entry in a world; without runs, why there are none."""

    record: EntryRecord
    runs: int = 0
    diverged: int = 0
    # arm − plain, and arm − best control, in the unit of the outcome; corrected over all entries of the world
    to_plain: Difference | None = None
    to_control: Difference | None = None
    # of a step, as a share of the plain model's: measured in turns, or else by the runs
    cost: float | None = None
    others: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return the verdict against the plain model, or why there is none."""
        if self.record.over:
            return self.record.status
        if self.record.kind == "plain":
            return "plain"
        return self.to_plain.verdict if self.to_plain is not None and self.to_plain.n else "missing"


@dataclasses.dataclass(frozen=True)
class WorldRead:
    """Hold one world as it was read."""

    folder: Path
    record: LeagueRecord
    study: StudyFolder
    outcome: Outcome
    # the control that validation data chose; empty where no control has been searched
    control: str
    cells: dict[str, Cell]
    figures: Figures


def read_worlds(folders: Sequence[Path]) -> list[WorldRead]:
    """Read worlds in the order given.

    Raises:
        StudyError: for a folder that is no world of a league, one without a finished search of the plain model, two of
            one world, and worlds that were searched with different numbers of trials.
    """
    found = [_read(folder) for folder in folders]
    names = [world.record.world for world in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise StudyError(f"the world {twice} was given twice. Give one folder for each world.")
    trials = {world.record.trials for world in found}
    if len(trials) > 1:
        raise StudyError(
            f"the worlds were searched with {', '.join(map(str, sorted(trials)))} trials an entry: a league has one "
            "number. Give those alike."
        )
    return found


def best_control(record: LeagueRecord, higher_is_better: bool) -> str:
    """Return the control whose search found the best figure on validation data: the test data have no part in the
    choice."""
    known = {
        name: one.validation for name, one in record.entries.items() if one.kind == "control" and one.status == "chosen"
    }
    scored = [(value if higher_is_better else -value, name) for name, value in known.items() if value is not None]
    return max(scored)[1] if scored else ""


def _read(folder: Path) -> WorldRead:
    import numpy as np

    record = world_folder.read(folder)
    try:
        study = read_study(folder)
    except FileNotFoundError:
        raise StudyError(
            f"{folder}: the search of the plain model has not ended, so nothing can be compared. Run the league on."
        ) from None
    except ValueError as error:
        raise StudyError(str(error)) from error
    outcome = study.study.outcome(study.study.primary)
    higher = outcome.higher_is_better is not False
    plain = next(name for name, one in record.entries.items() if one.kind == "plain")
    control = best_control(record, higher)
    against_plain = paired_differences(study, outcome.name, outcome.higher_is_better, study.study.margin)
    against_control: dict[str, Difference] = {}
    if control:
        label = record.entries[control].chosen
        arms = [arm for arm in study.arms if arm != study.baseline]
        # the plain model is no entry that a control is held against
        held = study.study.model_copy(update={"baseline": label, "arms": arms})
        against_control = paired_differences(
            dataclasses.replace(study, study=held), outcome.name, outcome.higher_is_better, study.study.margin
        )
    sign = 1.0 if higher else -1.0

    def figures(arm: str) -> Array:
        found = [study.figure(arm, seed, outcome.name) for seed in study.seeds]
        return sign * np.array([np.nan if value is None else value for value in found], dtype=float)

    chosen = {
        name: one.chosen for name, one in record.entries.items() if one.status == "chosen" and one.chosen in study.arms
    }
    # what else ran on the machine only lengthens a step: the shortest of the seeds tells most of it
    timed = step_times(folder)
    step = min(_figures_of(study, study.baseline, STEP), default=None)
    cells = {}
    for name, one in record.entries.items():
        if name not in chosen:
            cells[name] = Cell(one)
            continue
        arm, runs = chosen[name], [run for run in study.of(chosen[name]) if run.result]
        own = min(_figures_of(study, arm, STEP), default=None)
        cells[name] = Cell(
            one,
            runs=len(runs),
            diverged=sum(run.status == "diverged" for run in runs),
            to_plain=against_plain.get(arm),
            to_control=against_control.get(arm),
            cost=timed.get(name, own / step if own is not None and step else None),
            others=_others(study, arm, outcome.name),
        )
    entries = {name: figures(arm) for name, arm in chosen.items() if name != plain}
    return WorldRead(
        folder, record, study, outcome, control, cells, Figures(record.world, figures(study.baseline), entries)
    )


def _others(study: StudyFolder, arm: str, primary: str) -> dict[str, float]:
    """Return the means of the other outcomes of the split that decides, such as loss and calibration, of the deciding
    outcome with weights of 8 bits, and of the figures of heads."""
    split, _, deciding = primary.rpartition("/")
    names = [f"{split}/{metric.name}" for metric in study.study.metrics if metric.name != deciding]
    names.append(f"int8/{deciding}")
    names += sorted(
        {name for run in study.of(arm) if run.result for name in run.result.metrics if HEADS.fullmatch(name)}
    )
    values = {name: _figures_of(study, arm, name) for name in names}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def _figures_of(study: StudyFolder, arm: str, name: str) -> list[float]:
    return [value for run in study.of(arm) if run.result and (value := run.metric(name)) is not None]
