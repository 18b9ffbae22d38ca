"""A study as read from its folder: its description, and every run's state, epochs and health records."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from headwise_verdict.files.durable import finite
from headwise_verdict.results.copies import Trace, copied, same_start
from headwise_verdict.results.digests import RESULT, broken_seal, damage, digest_of
from headwise_verdict.results.health_records import Line, read_health
from headwise_verdict.results.records import (
    MAPS,
    CellRecord,
    EpochLine,
    MapsRecord,
    OutcomeNames,
    RunEntry,
    RunResult,
    StudyRecord,
)
from headwise_verdict.results.stored import (
    checked_config,
    checked_maps,
    checked_result,
    checked_study,
    read_epochs,
    read_whole_json,
)

WHILE_TRAINING = ("alerts/", "watched/")


@dataclass(frozen=True)
class RunFolder:
    """One run as stored on disk; `result` is None until the run has finished or diverged."""

    arm: str
    seed: int
    path: Path
    result: RunResult | None
    # what is wrong with the files of a finished run, in words; a run with damage counts as one without a result
    damage: tuple[str, ...] = ()

    @property
    def status(self) -> Literal["finished", "diverged", "damaged", "unfinished"]:
        """Return the state of the run."""
        if self.damage:
            return "damaged"
        return self.result.status if self.result else "unfinished"

    def metric(self, name: str) -> float | None:
        """Return a figure of a finished run, or None if the run did not finish or the figure is missing or not finite.

        Figures recorded during training (alerts, watched statistics) are also returned for a diverged run.
        """
        if self.result is None or not (self.result.status == "finished" or name.startswith(WHILE_TRAINING)):
            return None
        value = self.result.metrics.get(name)
        return float(value) if value is not None and math.isfinite(value) else None

    @property
    def watched(self) -> bool:
        """Return whether the health of the heads was recorded."""
        return self.result is not None and self.result.watched

    @cached_property
    def epochs(self) -> list[EpochLine]:
        """Return the lines of metrics.jsonl, one per epoch; empty for a damaged run."""
        return [] if self.damage else read_epochs(self.path / "metrics.jsonl")

    @property
    def trace(self) -> Trace:
        """Return what shows whether the run is a copy of another one; a diverged run has no outcomes."""
        result = self.result
        if result is None:
            return Trace({})
        figures = {name: value for name in result.metrics if (value := self.metric(name)) is not None}
        kept = {name: value for name, value in figures.items() if not name.startswith("cost/")}
        curve = [{"step": line.step, **line.metrics} for line in self.epochs]
        return Trace(kept if result.status == "finished" else {}, curve, result.evidence)

    @cached_property
    def maps(self) -> MapsRecord | None:
        """Return the attention maps that a finished run stored, or None if it stored none."""
        path = self.path / MAPS
        return checked_maps(path) if self.result is not None and path.is_file() else None

    def health(self) -> list[Line]:
        """Return the lines of health.jsonl (readings and alerts); empty if the run was not watched.

        A run that was killed and resumed records some steps twice: the later record is returned.
        """
        records = [] if self.damage else read_health(self.path / "health.jsonl")
        keys = ("alert", "statistic", "site", "head", "group", "step")
        return list({tuple(record.get(name) for name in keys): record for record in records}.values())


@dataclass(frozen=True)
class StudyFolder:
    """A study as stored on disk: its description and its runs by (arm, seed)."""

    path: Path
    study: StudyRecord
    runs: dict[tuple[str, int], RunFolder]
    # names of the folders in runs/ that are not part of the study
    strangers: tuple[str, ...] = ()
    # arms of a calculation without randomness: equal figures in all seeds are no sign that a seed set nothing
    calculated: Collection[str] = ()

    @property
    def arms(self) -> list[str]:
        """Return the labels of the arms, the baseline first."""
        return self.study.arms

    @property
    def baseline(self) -> str:
        """Return the label of the arm that all others are compared with."""
        return self.study.baseline

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of the study."""
        return self.study.seeds

    def of(self, arm: str) -> list[RunFolder]:
        """Return the runs of an arm that exist on disk, in the order of the seeds."""
        return [self.runs[arm, seed] for seed in self.seeds if (arm, seed) in self.runs]

    def figure(self, arm: str, seed: int, name: str) -> float | None:
        """Return the figure that the statistics use, or None.

        In the primary outcome a diverged run counts as the declared value of failure. The outcome "diverged" is 1 for a
        run that diverged and 0 for one that finished.
        """
        run = self.runs.get((arm, seed))
        if run is None:
            return None
        if name == OutcomeNames.DIVERGED:
            return float(run.status == "diverged") if run.result else None
        if run.status == "diverged" and name == self.study.primary:
            return self.study.failure
        return self._exact(name, run.metric(name), run)

    def _exact(self, name: str, value: float | None, run: RunFolder) -> float | None:
        """Return a share as an exact count over n, in double precision; a gap as the difference of two such shares."""
        evaluation, metric = self.study.parts(name)
        if value is None or self.study.outcome(name).unit != "%":
            return value
        if evaluation == "gap":
            ends = [(self._whole(f"{split}/{metric}"), run.metric(f"{split}/{metric}")) for split in ("train", "test")]
            parts = [total.exact(one) for total, one in ends if total and one is not None]
            return parts[0] - parts[1] if len(parts) == 2 else value
        total = self._whole(name)
        return total.exact(value) if total else value

    @cached_property
    def _wholes(self) -> dict[str, Whole | None]:
        return {}

    def _whole(self, name: str) -> Whole | None:
        if name not in self._wholes:
            every = (run.metric(name) for run in self.runs.values())
            self._wholes[name] = whole_of([value for value in every if value is not None])
        return self._wholes[name]

    def missing(self) -> list[tuple[str, int]]:
        """Return the (arm, seed) pairs without a result."""
        cells = [(arm, seed) for arm in self.arms for seed in self.seeds]
        return [cell for cell in cells if cell not in self.runs or self.runs[cell].result is None]

    @cached_property
    def copies(self) -> dict[str, str]:
        """Return, by arm, which of its seeds are copies of one run, and by what; such an arm gets no verdict."""
        kinds = {metric.name: metric for metric in self.study.metrics}
        names = dict.fromkeys(name for run in self.runs.values() if run.result for name in run.result.metrics)
        metrics = {name: kind for name in names if (kind := kinds.get(name.rpartition("/")[2]))}
        scores = [name for name, kind in metrics.items() if kind.higher_is_better]
        losses = [name for name, kind in metrics.items() if not kind.higher_is_better and kind.unit != "%"]
        drawn = {arm: runs for arm, runs in self._traces.items() if arm not in self.calculated}
        return copied(drawn, scores, losses, seeded=not (self.study.kind == "numbers" or self.of_script))

    @cached_property
    def of_script(self) -> bool:
        """Return whether the runs are those of a user's script, which sets its own seeds."""
        return any("script" in run.result.config.get("settings", {}) for run in self.runs.values() if run.result)

    @cached_property
    def same_starts(self) -> list[str]:
        """Return the arms whose runs began with the same weights and showed no data, so that seeds may be copies."""
        return [arm for arm, runs in self._traces.items() if same_start(runs)]

    @cached_property
    def _traces(self) -> dict[str, dict[int, Trace]]:
        return {arm: {run.seed: run.trace for run in self.of(arm) if run.result} for arm in self.arms}

    def damaged(self) -> list[RunFolder]:
        """Return the runs whose files were changed after they finished, in the order of arms and seeds."""
        return [run for arm in self.arms for run in self.of(arm) if run.damage]


def read_study(folder: str | Path) -> StudyFolder:
    """Return the study in `folder`.

    Raises FileNotFoundError without a study.json; ValueError for an invalid file, for a study whose baseline is not
    among its arms or whose list of runs, or anything else that its verdicts depend on, was changed, and for two results
    of the same arm and seed.
    """
    path = Path(folder)
    if not (path / "study.json").is_file():
        raise FileNotFoundError(
            f"{path} contains no study.json, so it is not the folder of a study. Give the folder named by --out."
        )
    study = checked_study(path / "study.json")
    if study.baseline not in study.arms:
        raise ValueError(
            f"{path / 'study.json'}: the baseline {study.baseline!r} is not among the arms {study.arms}. Start the "
            "command of the study again."
        )
    if study.ledger is not None and study.digest not in (None, _deciding(study)):
        raise ValueError(
            f"{path / 'study.json'}: its arms, baseline, seeds, outcomes, directions, units, margin, axes, claims or "
            "premises are not those of its runs. Start the command of the study again: it writes them again and keeps "
            "the runs."
        )
    if study.ledger is not None and study.ledger != ledger_of(study.runs, study.digest):
        raise ValueError(
            f"{path / 'study.json'}: its list of runs is not what `headwise compare` wrote. Start the command of the "
            "study again: it writes the list again and keeps the runs."
        )
    return StudyFolder(path, study, _runs(path, study), tuple(strangers(path, {entry.hash for entry in study.runs})))


# the entries of study.json that verdicts on given runs depend on, besides the list of these
DECIDING = (
    *("kind", "scale", "arms", "baseline", "seeds", "primary", "metrics", "evaluations", "margin"),
    *("axes", "claims", "premises"),
)


def sealed_study(study: StudyRecord) -> StudyRecord:
    """Return a study's record with the digests that reveal a later change of its runs or of what verdicts depend on."""
    digest = _deciding(study)
    return study.model_copy(update={"digest": digest, "ledger": ledger_of(study.runs, digest)})


def _deciding(study: StudyRecord) -> str:
    return digest_of(finite(study.model_dump(mode="json", include=set(DECIDING), exclude_defaults=True)))


def ledger_of(runs: Sequence[RunEntry], digest: str | None = None) -> str:
    """Return the digest of the list of runs in study.json, and of the digest of what verdicts depend on."""
    entries = [entry.model_dump(mode="json") for entry in runs]
    # studies of earlier versions have no such digest
    return digest_of(entries if digest is None else [entries, digest])


def strangers(path: Path, hashes: Collection[str]) -> list[str]:
    """Return the names of the run folders that are not part of the study in this folder, whose runs are `hashes`."""
    names = sorted(folder.parent.name for folder in (path / "runs").glob("*/config.json"))
    return [name for name in names if name not in hashes] if hashes else []


def _runs(path: Path, study: StudyRecord) -> dict[tuple[str, int], RunFolder]:
    # study.json lists its runs by hash: runs of an earlier configuration in the folder are not part of this study
    cells = {entry.hash: entry for entry in study.runs}
    runs: dict[tuple[str, int], RunFolder] = {}
    for folder in sorted((path / "runs").glob("*")):
        if not (folder / "config.json").is_file() or (cells and folder.name not in cells):
            continue
        try:
            cell: CellRecord | RunEntry = checked_config(folder / "config.json")
            result = checked_result(folder / RESULT) if (folder / RESULT).is_file() else None
        except ValueError as error:
            entry = cells.get(folder.name)
            if entry is None or study.ledger is None:
                raise
            _add(runs, RunFolder(entry.arm, entry.seed, folder, None, (f"its files cannot be read: {error}",)))
            continue
        if isinstance(cell, CellRecord) and cell.purpose != "final":
            continue
        # study.json decides which run a folder contains, whatever its config.json says
        cell = cells.get(folder.name, cell)
        problems = _damage(folder, result, sealed=study.ledger is not None) if result else ()
        _add(runs, RunFolder(cell.arm, cell.seed, folder, None if problems else result, problems))
    return runs


def _damage(folder: Path, result: RunResult, *, sealed: bool) -> tuple[str, ...]:
    """Return what is wrong with a finished run's files, in words; without a ledger, results need no digest."""
    if sealed and result.hash != folder.name:
        return (f"{RESULT} is of the run {result.hash}",)
    if why := broken_seal(read_whole_json(folder / RESULT), required=sealed):
        return (f"{RESULT} {why}",)
    return tuple(damage(folder, result.digests))


def _add(runs: dict[tuple[str, int], RunFolder], run: RunFolder) -> None:
    cell = (run.arm, run.seed)
    other = runs.get(cell)
    if other is not None and other.result and run.result:
        raise ValueError(
            f"{other.path} and {run.path} both hold a result of {run.arm} with seed {run.seed}: their configurations "
            "differ. Move the one that does not belong to this study away."
        )
    if other is None or run.result:
        runs[cell] = run


MOST = 1_000_000  # the largest n (examples, pixels or letters) that is tried
# relative errors of a quotient in double and single precision; in single it may have been summed over batches
ROUNDINGS = (2.0**-51, 4 * 2.0**-24)
# largest probability of taking figures that are not shares for shares
CHANCE = 1e-6


class Whole(NamedTuple):
    """The number n of which a share is a part."""

    number: int

    def exact(self, value: float) -> float:
        """Return the share in double precision, as a whole number divided by n."""
        return round(value * self.number) / self.number


def whole_of(values: Sequence[float], rounding: float | None = None) -> Whole | None:
    """Return the number of which all `values` are shares, or None if the smallest that fits could fit by chance.

    `rounding` is the absolute error of a figure, for differences of shares; with None, relative errors are tried,
    those of double precision first.
    """
    import numpy as np

    shares = np.unique(np.abs(np.asarray(values, dtype=float)))
    shares = shares[np.isfinite(shares) & (shares > 0) & (shares != 1)]
    if not len(shares):
        return Whole(1)
    for relative in ROUNDINGS if rounding is None else (None,):
        errors = np.full(len(shares), rounding) if relative is None else relative * shares
        if number := _least_number(shares, errors):
            return Whole(number)
    return None


def _least_number(shares, errors) -> int | None:  # type: ignore[no-untyped-def]
    import numpy as np

    # in growing blocks, because the smallest number that fits is usually small
    first, left = 1, np.empty(0)
    while not len(left):
        if first > MOST:
            return None
        left = np.arange(first, min(8 * first, MOST + 1), dtype=float)
        for value, error in zip(shares, errors):
            products = left * value
            # the product is rounded as well
            left = left[np.abs(products - np.rint(products)) <= left * error + products * 2.0**-52]
        first *= 8
    least = left[0]
    # the probability that some number up to the smallest fits by chance
    below = np.arange(1, least + 1)
    fits = np.minimum(2 * below[:, None] * errors[:64], 1.0).prod(axis=1).sum()
    return int(least) if fits < CHANCE else None
