"""A finished world in one file, without its run folders: what its page and tables are computed from.

`headwise league` writes one for each world, and reads them like the folders, so that a league can be published, and
worlds that were run on different machines can be read together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from headwise_papers.league import world_folder
from headwise_papers.league.world_folder import FRESH, PAIRS, LeagueRecord, is_ready, step_times
from headwise_verdict.files.durable import read_json
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.foreign_text import printable
from headwise_verdict.results.folder import RunFolder, StudyFolder, read_study
from headwise_verdict.results.records import Record, RunResult, StudyRecord


class RunFigures(Record):
    """The figures of one final run, by outcome name."""

    arm: str
    seed: int
    status: Literal["finished", "diverged"]
    metrics: dict[str, float | None]


class WorldFile(Record):
    """The content of a world's file: its searches, its study without the list of run folders, and its final runs."""

    format: Literal[1] = 1
    record: LeagueRecord
    study: StudyRecord
    runs: tuple[RunFigures, ...] = Field(strict=False)
    # time of a step of each entry as a ratio to the plain model's, if measured
    step_times: dict[str, float] = {}
    # the winners on fresh seeds and the pairs of methods, if they were run
    fresh: WorldFile | None = None
    pairs: WorldFile | None = None


@dataclass(frozen=True)
class Contents:
    """What a world's folder or file contains."""

    record: LeagueRecord
    study: StudyFolder
    step_times: dict[str, float]
    fresh: Contents | None = None
    pairs: Contents | None = None


def contents_of(path: Path) -> Contents:
    """Return the contents of a world's folder, or of its file.

    Raises:
        StudyError: if it is neither, if the file is invalid, or if the search of the plain model has not ended.
    """
    if path.is_file():
        return _opened(_checked(path), path)
    record = world_folder.read(path)
    try:
        study = read_study(path)
    except FileNotFoundError:
        raise StudyError(f"{path} cannot be read: {world_folder.why_not_ready(path)}") from None
    except ValueError as error:
        raise StudyError(str(error)) from error
    parts = follow_up_of(path)
    return Contents(record, study, step_times(path), parts.get(FRESH), parts.get(PAIRS))


def follow_up_of(folder: Path) -> dict[str, Contents]:
    """Return the contents of a world's subfolders, by name: the runs on fresh seeds and the pairs that exist."""
    return {name: contents_of(folder / name) for name in (FRESH, PAIRS) if is_ready(folder / name)}


def as_file(contents: Contents, outcomes: Iterable[str]) -> WorldFile:
    """Return the file of a world, with these outcomes of every final run."""
    study, names = contents.study, list(outcomes)
    runs = [run for arm in study.arms for run in study.of(arm)]
    figures = [
        RunFigures(
            arm=run.arm,
            seed=run.seed,
            status=run.result.status,
            metrics={name: run.result.metrics[name] for name in names if name in run.result.metrics},
        )
        for run in runs
        if run.result is not None
    ]
    # the list of run folders and the notes on each choice concern the folder
    bare = study.study.model_copy(update={"runs": [], "digest": None, "ledger": None, "notes": []})
    fresh, pairs = (None if part is None else as_file(part, names) for part in (contents.fresh, contents.pairs))
    return WorldFile(
        record=contents.record,
        study=bare,
        runs=tuple(figures),
        step_times=contents.step_times,
        fresh=fresh,
        pairs=pairs,
    )


def _checked(path: Path) -> WorldFile:
    try:
        return WorldFile.model_validate(printable(read_json(path)))
    except ValueError as error:
        raise StudyError(
            f"{path} is not the file of a league's world ({error}). Give the folders that `headwise league --run` "
            "wrote, or the .json files next to its page."
        ) from error


def _opened(file: WorldFile, path: Path) -> Contents:
    runs = {
        (run.arm, run.seed): RunFolder(
            run.arm,
            run.seed,
            path,
            RunResult(format=2, status=run.status, arm=run.arm, seed=run.seed, hash="", metrics=run.metrics),
        )
        for run in file.runs
    }
    fresh, pairs = (None if part is None else _opened(part, path) for part in (file.fresh, file.pairs))
    return Contents(file.record, StudyFolder(path, file.study, runs), file.step_times, fresh, pairs)
