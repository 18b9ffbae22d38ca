"""Further sections of a league's page: the winners on fresh seeds, pairs, and how close the trials of searches were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.league.gains import Aggregate, Estimate, Worlds
from headwise.league.reading import WorldRead, read_world
from headwise.league.tables import kinds_of, ordered
from headwise.pages.formats import MINUS
from headwise.pages.shell import Cell as Shown
from headwise.pages.shell import Column, Section, table

# a pair's name, and its differences from the gains of its first and second part
Pair = tuple[str, tuple[Estimate, Estimate]]


def fresh_worlds(read: Sequence[WorldRead]) -> list[WorldRead]:
    """Return the worlds with runs on fresh seeds, read from these runs, with gains in the league's own units."""
    fresh = []
    for world in read:
        if world.contents.fresh is not None:
            again = read_world(world.contents.fresh)
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


def pairs_over(read: Sequence[WorldRead], worlds: Worlds, aggregates: dict[str, Aggregate]) -> list[Pair]:
    """Return every pair whose parts are entries too, with its differences from both, by falling gain."""
    kinds = kinds_of(read)
    names = [name for name in ordered(aggregates) if kinds[name] == "pair"]
    parts = {name: tuple(name.split("+")) for name in names}
    names = [name for name in names if len(parts[name]) == 2 and all(part in aggregates for part in parts[name])]
    over = iter(worlds.differences([(name, part) for name in names for part in parts[name]]))
    return [(name, (next(over), next(over))) for name in names]


def pair_section(pairs: Sequence[Pair], aggregates: dict[str, Aggregate]) -> list[Section]:
    """Return the table of pairs and their parts; empty without pairs."""
    if not pairs:
        return []
    columns = [Column("pair")]
    columns += [
        Column(name, unit="spreads", number=True)
        for name in ("gain", "first alone", "second alone", "over the first", "over the second")
    ]
    rows = [
        [name, *(shown(aggregates[one].gain) for one in (name, *name.split("+"))), *map(shown, over)]
        for name, over in pairs
    ]
    words = (
        "Each pair was searched like any entry, over both strengths. A gain adds up where the pair lies above both of "
        "its parts by the intervals of the last two columns (paired seeds, worlds in which both ran)."
    )
    return [Section("Pairs", table(columns, rows), words)]


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
