"""Further sections of a league's page: the winners on fresh seeds, pairs, and how close the trials of searches were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise_papers.league.gains import Aggregate, Estimate, Figures, Worlds
from headwise_papers.league.reading import WorldRead, current_part, read_world
from headwise_papers.league.tables import PairRow
from headwise_verdict.pages.formats import MINUS
from headwise_verdict.pages.shell import Cell as Shown
from headwise_verdict.pages.shell import Column, Section, table


def fresh_worlds(read: Sequence[WorldRead]) -> list[WorldRead]:
    """Return the worlds with runs on fresh seeds, read from these runs, with gains in the league's own units."""
    fresh = []
    for world in read:
        part, _ = current_part(world.contents, world.contents.fresh)
        if part is not None:
            again = read_world(part)
            figures = dataclasses.replace(again.figures, unit=world.figures.spread)
            fresh.append(dataclasses.replace(again, figures=figures))
    return fresh


def fresh_section(
    aggregates: dict[str, Aggregate], fresh_aggregates: dict[str, Aggregate], kinds: dict[str, str]
) -> list[Section]:
    """Return the table of gains in the league and on fresh seeds; empty without runs on fresh seeds."""
    if not fresh_aggregates:
        return []
    columns = [Column("entry"), Column("kind"), Column("worlds", number=True)]
    columns += [Column(name, unit="spreads", number=True) for name in ("gain in the league", "gain on fresh seeds")]
    rows = [
        [name, kinds[name], one.worlds, shown(aggregates[name].gain), shown(one.gain)]
        for name, one in sorted(fresh_aggregates.items(), key=lambda item: -(item[1].gain.value or 0.0))
    ]
    words = (
        "The highest of many entries is too high by chance. These were run again, at what their searches had chosen, "
        "on seeds that no earlier run had; both columns are in units of the league's plain model."
    )
    return [Section("On fresh seeds", table(columns, rows), words)]


def pair_worlds(read: Sequence[WorldRead]) -> list[WorldRead]:
    """Return the worlds with pairs, read from the runs of pairs; their figures also have the parts' league runs.

    A pair was trained next to a plain model of its own, perhaps on another processor than its parts. Its figures are
    moved by the difference of both plain models, seed by seed, so that every gain is against the plain model of the
    same machine.
    """
    worlds = []
    for world in read:
        part, _ = current_part(world.contents, world.contents.pairs)
        if part is None:
            continue
        again = read_world(part)
        place = {seed: at for at, seed in enumerate(again.study.seeds)}
        at = np.array([place.get(seed, -1) for seed in world.study.seeds])

        def on_its_seeds(values: Any, at: Any = at) -> Any:
            return np.where(at < 0, np.nan, values[at])

        moved = world.figures.plain - on_its_seeds(again.figures.plain)
        pairs = {name: on_its_seeds(values) + moved for name, values in again.figures.entries.items()}
        parts = {part for name in pairs for part in name.split("+")}
        entries = {name: values for name, values in world.figures.entries.items() if name in parts}
        figures = Figures(world.record.world, world.figures.plain, {**entries, **pairs}, world.figures.spread)
        worlds.append(dataclasses.replace(again, figures=figures))
    return worlds


def pair_rows(worlds: Sequence[WorldRead]) -> list[PairRow]:
    """Return every pair, its parts' gains and its differences from both: over all worlds, then world by world.

    The gains of a pair's parts are over the worlds in which the pair ran.
    """
    rows = _rows_of(worlds, "all") if len(worlds) > 1 else []
    for world in worlds:
        rows += _rows_of([world], world.record.world)
    return rows


def _rows_of(worlds: Sequence[WorldRead], title: str) -> list[PairRow]:
    ran_in: dict[str, list[Figures]] = {}
    for world in worlds:
        for name, cell in world.cells.items():
            if cell.record.kind == "pair" and all(part in world.figures.entries for part in (name, *name.split("+"))):
                ran_in.setdefault(name, []).append(world.figures)
    # one resampling for all pairs that ran in the same worlds
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, figures in ran_in.items():
        alike.setdefault(tuple(one.name for one in figures), []).append(name)
    rows = []
    for names in alike.values():
        over = Worlds(ran_in[names[0]])
        if not over.worlds:
            continue
        aggregates = over.aggregates()
        against = [
            (name, others)
            for name in names
            for one, other in [name.split("+")]
            for others in ([one], [other], [one, other])
        ]
        differences = iter(over.differences(against))
        for name in names:
            gain, first, second = (aggregates[part].gain for part in (name, *name.split("+")))
            counted = aggregates[name].worlds
            over_each = (next(differences), next(differences), next(differences))
            rows.append(PairRow(title, name, counted, gain, first, second, *over_each))
    return sorted(rows, key=lambda row: (-row.worlds, -(row.gain.value or 0.0), row.pair))


def pair_section(rows: Sequence[PairRow]) -> list[Section]:
    """Return the table of pairs and their parts; empty without pairs."""
    if not rows:
        return []
    columns = [Column("world"), Column("pair"), Column("worlds", number=True)]
    columns += [
        Column(name, unit="spreads", number=True)
        for name in ("gain", "first alone", "second alone", "over the first", "over the second", "over their sum")
    ]
    cells = [
        [
            row.world,
            row.pair,
            row.worlds,
            *map(shown, (row.gain, row.first, row.second, row.over_first, row.over_second, row.over_sum)),
        ]
        for row in rows
    ]
    words = (
        "Each pair was searched like any entry, over both strengths. It is better than either part alone where the "
        "intervals over the first and over the second are above 0; gains add up where it is not below their sum. "
        "Paired seeds, the worlds in which the pair ran; not corrected over pairs."
    )
    return [Section("Pairs", table(columns, cells), words)]


def search_section(read: Sequence[WorldRead]) -> list[Section]:
    """Return the section on how much the trials of each world's searches differ, in spreads of the plain model."""
    rows: list[list[Any]] = []
    for world in read:
        spread, higher = world.figures.spread, world.outcome.higher_is_better is not False
        gaps, widths = [], []
        for cell in world.cells.values():
            values = sorted((one.value for one in cell.record.tried if one.value is not None), reverse=higher)
            if cell.record.status == "chosen" and len(values) > 1:
                gaps.append(abs(values[0] - values[1]) / spread)
                widths.append(abs(values[0] - float(np.median(values))) / spread)
        if gaps and np.isfinite(spread) and spread > 0:
            close = sum(gap < 1 for gap in gaps)
            rows.append([world.record.title, len(gaps), Shown(f"{close} of {len(gaps)}", close)])
            rows[-1] += [float(np.median(gaps)), float(np.median(widths))]
    if not rows:
        return []
    columns = [Column("world"), Column("searches", number=True)]
    columns += [Column("best and second within one spread", number=True)]
    columns += [Column("best − second, median", unit="spreads", number=True)]
    columns += [Column("best − median trial, median", unit="spreads", number=True)]
    words = (
        "Every trial is one run on one seed. Where the best and the second best trial lie within one spread of the "
        "plain model between seeds, another seed would as well have chosen the other: what an entry gains here is "
        "what this search finds, not what its best setting would give."
    )
    return [Section("The search", table(columns, rows), words)]


def shown(figure: Estimate) -> Shown:
    """Return an estimate as a cell of a table."""
    return Shown(None if figure.value is None else estimate(figure), figure.value)


def estimate(figure: Estimate) -> str:
    """Return an estimate with its interval as text; "" without a value."""
    if figure.value is None:
        return ""
    ends = "" if figure.low is None or figure.high is None else f" [{_number(figure.low)}, {_number(figure.high)}]"
    return f"{_number(figure.value)}{ends}"


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)
