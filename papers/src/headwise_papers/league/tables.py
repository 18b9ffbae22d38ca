"""The tables of a league as CSV: cells, runs, trials, aggregate, winners on fresh seeds, pairs, worlds left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from headwise_papers.league.gains import Aggregate, Estimate, Worlds
from headwise_papers.league.reading import WorldRead
from headwise_verdict.reporting.plain_tables import as_csv
from headwise_verdict.results.analysis_record import Difference

ENDS = ("", "_low", "_high")


def runs_csv(read: Sequence[WorldRead]) -> str:
    """Return a row per final run: the primary outcome and the others that the page shows."""
    rows: list[list[Any]] = []
    names = list(dict.fromkeys(name for world in read for cell in world.cells.values() for name in cell.others))
    for world in read:
        for name, cell in world.cells.items():
            for run in world.study.of(cell.record.chosen) if cell.runs else []:
                if run.result is not None:
                    figures = [world.study.figure(run.arm, run.seed, world.outcome.name), *map(run.metric, names)]
                    rows.append([world.record.world, name, run.seed, run.status, world.outcome.name, *figures])
    return as_csv([["world", "entry", "seed", "status", "outcome", "figure", *names], *rows])


def fresh_csv(aggregates: dict[str, Aggregate], fresh_aggregates: dict[str, Aggregate]) -> str:
    """Return a row per entry that was run again: its gain in the league and on fresh seeds."""
    head = ["entry", "worlds", *(f"{p}{end}" for p in ("gain", "fresh") for end in ENDS)]
    rows = [
        [name, one.worlds, *_ends(aggregates[name].gain), *_ends(one.gain)] for name, one in fresh_aggregates.items()
    ]
    return as_csv([head, *rows])


@dataclasses.dataclass(frozen=True)
class PairRow:
    """A pair of entries in one world, or over "all": its gain, its parts' gains, and its differences from each of them
    and from their sum."""

    world: str
    pair: str
    worlds: int
    gain: Estimate
    first: Estimate
    second: Estimate
    over_first: Estimate
    over_second: Estimate
    over_sum: Estimate


def pairs_csv(rows: Sequence[PairRow]) -> str:
    """Return a row per pair and world, and per pair over all worlds."""
    parts = ("gain", "first", "second", "over_first", "over_second", "over_sum")
    head = ["world", "pair", "worlds", *(f"{part}{end}" for part in parts for end in ENDS)]
    figures = ([end for part in parts for end in _ends(getattr(row, part))] for row in rows)
    return as_csv([head, *([row.world, row.pair, row.worlds, *ends] for row, ends in zip(rows, figures))])


def worlds_of(read: Sequence[WorldRead], name: str, verdict: str) -> list[str]:
    """Return the titles of the worlds in which an entry has this verdict against the plain model."""
    return [world.record.title for world in read if name in world.cells and world.cells[name].verdict == verdict]


def without_csv(gains: dict[str, dict[str, float | None]]) -> str:
    """Return a row per entry: its gain over all worlds but one, for each world left out."""
    names = list(dict.fromkeys(name for by_name in gains.values() for name in by_name))
    rows = ([name, *(by_name.get(name) for by_name in gains.values())] for name in names)
    return as_csv([["entry", *(f"without {world}" for world in gains)], *rows])


def left_out_csv(estimates: dict[str, Estimate]) -> str:
    """Return a row per world: how well the other worlds predict the order of its entries."""
    return as_csv(
        [
            ["left_out", *(f"rank_correlation{end}" for end in ENDS)],
            *([name, *_ends(one)] for name, one in estimates.items()),
        ]
    )


def cells_csv(read: Sequence[WorldRead], worlds: Worlds) -> str:
    """Return a row per entry and world; missing figures are empty."""
    gains = worlds.mean_gains()
    head = (
        "world,entry,kind,arm,status,chosen,learning_rate,validation,second_validation,runs,diverged,outcome,"
        "difference,low,high,p,verdict,"
    )
    rows: list[list[Any]] = [
        (head + "against_control,control_low,control_high,control_verdict,gain,cost,why").split(",")
    ]
    for world in read:
        higher = world.outcome.higher_is_better is not False
        for name, cell in world.cells.items():
            one, plain, control = cell.record, cell.to_plain, cell.to_control
            values = sorted((trial.value for trial in one.tried if trial.value is not None), reverse=higher)
            rows.append(
                [world.record.world, name, one.kind, one.arm, one.status, one.chosen, one.rate]
                + [one.validation, values[1] if len(values) > 1 else None, cell.runs, cell.diverged, world.outcome.name]
                + _cells_of(plain, p=True)
                + _cells_of(control)
                + [gains.get(world.record.world, {}).get(name), cell.cost, one.why]
            )
    return as_csv(rows)


def aggregate_csv(read: Sequence[WorldRead], aggregates: dict[str, Aggregate]) -> str:
    """Return a row per entry: its aggregate, each figure with its interval, and in how many worlds it is better and
    worse than the plain model."""
    kinds, costs = kinds_of(read), costs_of(read)
    parts = ("gain", "improvement", "rank")
    rows: list[list[Any]] = [
        ["entry", "kind", "worlds", *(f"{p}{end}" for p in parts for end in ENDS), "cost", "better_in", "worse_in"]
    ]
    for name in ordered(aggregates):
        one = aggregates[name]
        figures = [value for part in parts for value in _ends(getattr(one, part))]
        counts = [len(worlds_of(read, name, verdict)) for verdict in ("better", "worse")]
        rows.append([name, kinds[name], one.worlds, *figures, costs.get(name), *counts])
    return as_csv(rows)


def trials_csv(read: Sequence[WorldRead]) -> str:
    """Return a row per trial of every search; a diverged trial has no value."""
    rows = [
        [world.record.world, name, trial.arm, trial.rate, trial.value]
        for world in read
        for name, cell in world.cells.items()
        for trial in cell.record.tried
    ]
    return as_csv([["world", "entry", "arm", "learning_rate", "validation"], *rows])


def _cells_of(difference: Difference | None, *, p: bool = False) -> list[Any]:
    if difference is None:
        return [None] * (5 if p else 4)
    return [
        difference.mean,
        difference.low,
        difference.high,
        *([difference.p_corrected] if p else []),
        difference.verdict,
    ]


def _ends(estimate: Estimate) -> tuple[float | None, float | None, float | None]:
    return estimate.value, estimate.low, estimate.high


def ordered(aggregates: dict[str, Aggregate]) -> list[str]:
    """Return the entries by falling gain, last those that lack a world, whose gains are not comparable."""
    most = max((one.worlds for one in aggregates.values()), default=0)

    def place(name: str) -> tuple[bool, bool, float, str]:
        one = aggregates[name]
        return one.worlds < most, one.gain.value is None, -(one.gain.value or 0.0), name

    return sorted(aggregates, key=place)


def kinds_of(read: Sequence[WorldRead]) -> dict[str, str]:
    """Return the kind of every entry."""
    return {name: cell.record.kind for world in read for name, cell in world.cells.items()}


def costs_of(read: Sequence[WorldRead]) -> dict[str, float]:
    """Return, by entry, the mean over worlds of the time of a step as a ratio to the plain model's."""
    costs: dict[str, list[float]] = {}
    for world in read:
        for name, cell in world.cells.items():
            if cell.cost is not None:
                costs.setdefault(name, []).append(cell.cost)
    return {name: sum(values) / len(values) for name, values in costs.items()}
