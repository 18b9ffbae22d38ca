"""Reading of finished worlds: the results of every entry against the plain model and against the best control."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise_papers.league.gains import Figures
from headwise_papers.league.world_file import Contents, WorldFile, as_file, contents_of, follow_up_of
from headwise_papers.league.world_folder import FRESH, PAIRS, EntryRecord, LeagueRecord
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.analysis_record import Difference
from headwise_verdict.results.differences import paired_differences
from headwise_verdict.results.folder import StudyFolder
from headwise_verdict.results.records import Outcome
from headwise_verdict.results.stored import naming

if TYPE_CHECKING:
    from headwise_papers.league.gains import Array

STEP = "cost/seconds_per_step"
# the mean over the heads of a model
HEADS = re.compile(r"heads/[^/]+/mean")


@dataclasses.dataclass(frozen=True)
class Cell:
    """The results of an entry in a world; without runs, the record has the reason."""

    record: EntryRecord
    runs: int = 0
    diverged: int = 0
    # arm − plain and arm − best control, in the unit of the outcome, corrected over all entries of the world
    to_plain: Difference | None = None
    to_control: Difference | None = None
    # time of a step as a ratio to the plain model's: measured in alternation, else taken from the runs
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
    """One world as read from its folder or file."""

    contents: Contents
    outcome: Outcome
    # the control with the best validation figure; "" if the search of none has ended
    control: str
    cells: dict[str, Cell]
    figures: Figures

    @property
    def record(self) -> LeagueRecord:
        """Return the searches of the world's entries."""
        return self.contents.record

    @property
    def study(self) -> StudyFolder:
        """Return the final runs."""
        return self.contents.study

    def file(self) -> WorldFile:
        """Return the world as one file, with all that pages and tables show."""
        others = dict.fromkeys(name for cell in self.cells.values() for name in cell.others)
        return as_file(self.contents, [self.outcome.name, *others, STEP])


def read_worlds(paths: Sequence[Path], follow_up_in: Path | None = None) -> list[WorldRead]:
    """Return the worlds in the order of their folders or files.

    If the folder `follow_up_in` contains runs on fresh seeds or pairs of a world, they replace those in its own folder
    or file.

    Raises:
        StudyError: for a path that is not a world of a league, one whose search of the plain model has not ended, two
            paths of the same world, and worlds searched with different numbers of trials.
    """
    contents = []
    for path in paths:
        with naming(path):
            contents.append(contents_of(path))
    if follow_up_in is not None:
        contents = [_followed_up(one, follow_up_of(follow_up_in / one.record.world)) for one in contents]
    worlds = []
    for path, one in zip(paths, contents, strict=True):
        with naming(path):
            worlds.append(read_world(one))
    names = [world.record.world for world in worlds]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise StudyError(f"the world {repeated} was given twice. Give one folder or file for each world.")
    _check_names(worlds)
    trials = {world.record.trials for world in worlds}
    if len(trials) > 1:
        raise StudyError(
            f"the worlds were searched with {', '.join(map(str, sorted(trials)))} trials per entry: a league has one "
            "number. Give only worlds with the same number."
        )
    return worlds


def _check_names(worlds: Sequence[WorldRead]) -> None:
    """Raise StudyError if one name stands for different searches, or kinds, in different worlds."""
    seen: dict[str, tuple[str, EntryRecord]] = {}
    for world in worlds:
        for name, one in world.record.entries.items():
            where, first = seen.setdefault(name, (world.record.world, one))
            if (first.digest, first.kind) != (one.digest, one.kind):
                what = "another kind" if first.kind != one.kind else "another arm, other ranges or other trials"
                raise StudyError(
                    f"the entry {name} has {what} in {world.record.world} than in {where}, so its gains cannot be "
                    "aggregated. Rename one of the two, or run the older again: headwise league --run."
                )


def current_part(contents: Contents, part: Contents | None) -> tuple[Contents | None, list[str]]:
    """Return a world's runs on fresh seeds, or its pairs, without the cells of searches that the league has replaced.

    Return the names of what was left out too.
    """
    if part is None:
        return None, []
    league = contents.record.entries

    def is_current(name: str, one: EntryRecord) -> bool:
        if one.kind == "pair":
            return all(part in league and league[part].digest == digest for part, digest in one.parts.items())
        return name in league and (one.chosen, one.rate) == (league[name].chosen, league[name].rate)

    kept = {name: one for name, one in part.record.entries.items() if is_current(name, one)}
    replaced = [name for name in part.record.entries if name not in kept]
    if not any(one.kind == "plain" for one in kept.values()):
        return None, replaced
    record = part.record.model_copy(update={"entries": kept})
    return dataclasses.replace(part, record=record), replaced


def _followed_up(contents: Contents, parts: dict[str, Contents]) -> Contents:
    return dataclasses.replace(contents, fresh=parts.get(FRESH, contents.fresh), pairs=parts.get(PAIRS, contents.pairs))


def best_control(record: LeagueRecord, higher_is_better: bool) -> str:
    """Return the control with the best figure on validation data; test data play no part in the choice."""
    validation = {
        name: one.validation for name, one in record.entries.items() if one.kind == "control" and one.status == "chosen"
    }
    scored = [(value if higher_is_better else -value, name) for name, value in validation.items() if value is not None]
    return max(scored)[1] if scored else ""


def read_world(contents: Contents) -> WorldRead:
    """Return one world: every entry's results, differences and figures."""
    import numpy as np

    record, study = contents.record, contents.study
    outcome = study.study.outcome(study.study.primary)
    higher = outcome.higher_is_better is not False
    plain = next(name for name, one in record.entries.items() if one.kind == "plain")
    control = best_control(record, higher)
    against_plain = paired_differences(study, outcome.name, outcome.higher_is_better, study.study.margin)
    against_control: dict[str, Difference] = {}
    if control:
        label = record.entries[control].chosen
        arms = [arm for arm in study.arms if arm != study.baseline]
        # the plain model is not among the entries compared with the control
        study_against_control = study.study.model_copy(update={"baseline": label, "arms": arms})
        against_control = paired_differences(
            dataclasses.replace(study, study=study_against_control),
            outcome.name,
            outcome.higher_is_better,
            study.study.margin,
        )
    sign = 1.0 if higher else -1.0

    def figures(arm: str) -> Array:
        values = [study.figure(arm, seed, outcome.name) for seed in study.seeds]
        return sign * np.array([np.nan if value is None else value for value in values], dtype=float)

    chosen = {
        name: one.chosen for name, one in record.entries.items() if one.status == "chosen" and one.chosen in study.arms
    }
    # other work on the machine only lengthens a step, so the shortest time over the seeds is the best estimate
    measured = contents.step_times
    plain_step = min(_figures_of(study, study.baseline, STEP), default=None)
    cells = {}
    for name, one in record.entries.items():
        if name not in chosen:
            cells[name] = Cell(one)
            continue
        arm, runs = chosen[name], [run for run in study.of(chosen[name]) if run.result]
        own_step = min(_figures_of(study, arm, STEP), default=None)
        cells[name] = Cell(
            one,
            runs=len(runs),
            diverged=sum(run.status == "diverged" for run in runs),
            to_plain=against_plain.get(arm),
            to_control=against_control.get(arm),
            cost=measured.get(name, own_step / plain_step if own_step is not None and plain_step else None),
            others=_others(study, arm, outcome.name),
        )
    entries = {name: figures(arm) for name, arm in chosen.items() if name != plain}
    ours = Figures(record.world, figures(study.baseline), entries, _unit(contents, outcome.name))
    return WorldRead(contents, outcome, control, cells, ours)


def plain_figures(contents: Contents, outcome: str) -> list[float]:
    """Return the figures of the plain model on all its seeds: those of the league, and fresh ones."""
    studies = [contents.study, *([contents.fresh.study] if contents.fresh is not None else [])]
    values = [study.figure(study.baseline, seed, outcome) for study in studies for seed in study.seeds]
    return [value for value in values if value is not None and value == value]


def _unit(contents: Contents, outcome: str) -> float | None:
    """Return the plain model's standard deviation over all its seeds, if some are fresh: eight alone may miss that it
    fails on some seeds."""
    import numpy as np

    if contents.fresh is None:
        return None
    values = plain_figures(contents, outcome)
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _others(study: StudyFolder, arm: str, primary: str) -> dict[str, float]:
    """Return the means of further outcomes: the other metrics of the primary outcome's split, such as the loss, the
    primary metric with 8-bit weights, and the statistics of heads."""
    split, _, primary_metric = primary.rpartition("/")
    names = [f"{split}/{metric.name}" for metric in study.study.metrics if metric.name != primary_metric]
    names.append(f"int8/{primary_metric}")
    names += sorted(
        {name for run in study.of(arm) if run.result for name in run.result.metrics if HEADS.fullmatch(name)}
    )
    values = {name: _figures_of(study, arm, name) for name in names}
    return {name: sum(figures) / len(figures) for name, figures in values.items() if figures}


def _figures_of(study: StudyFolder, arm: str, name: str) -> list[float]:
    return [value for run in study.of(arm) if run.result and (value := run.metric(name)) is not None]
