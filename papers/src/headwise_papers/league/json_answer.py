"""What `headwise league --json` prints: the aggregate, the verdicts world by world, and the follow-ups."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# increased when a field changes its meaning or goes
SCHEMA: Literal["headwise.league/1"] = "headwise.league/1"


class _Shown(BaseModel):
    """A part of the object; its fields are those of the schema, all of them always present."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class Figure(_Shown):
    """A figure and its 95 % interval; null where no world has data for it."""

    value: float | None
    low: float | None
    high: float | None


class Entry(_Shown):
    """An entry over all worlds in which it ran; gains are in spreads of the plain model over seeds."""

    entry: str
    kind: str
    worlds: int
    gain: Figure
    improvement: Figure = Field(description="probability that a run is better than one of the plain model")
    rank: Figure
    cost: float | None = Field(description="time of a step as a multiple of the plain model's")
    better_in: int = Field(description="worlds")
    worse_in: int = Field(description="worlds")
    fresh: Figure | None = Field(description="the gain on fresh seeds; null: it was not run again in all its worlds")


class InWorld(_Shown):
    """An entry in one world, against the plain model and against the best control of that world."""

    world: str
    entry: str
    arm: str | None = Field(description="the setting that the search chose, or else the entry's own")
    state: str
    verdict: str | None = Field(description="against the plain model; null: the plain model, or no runs")
    control_verdict: str | None = Field(description="against the best control")
    outcome: str
    difference: Figure = Field(description="from the plain model, in the unit of the outcome")
    p: float | None = Field(description="corrected for the number of entries")
    gain: float | None
    runs: int
    diverged: int
    reason: str = Field(description="why it failed or was refused")


class Pair(_Shown):
    """A pair of entries in one world, or over all of them."""

    world: str
    pair: str
    gain: Figure
    over_first: Figure
    over_second: Figure


class League(_Shown):
    """The object that the command prints."""

    schema_: Literal["headwise.league/1"] = Field(default=SCHEMA, alias="schema")
    page: str | None = Field(description="null: no world has final runs yet")
    complete: bool | None = Field(description="whether nothing is missing after --run; null: nothing was to be run")
    worlds: list[str]
    entries: list[Entry] = Field(description="by falling gain; last those that lack a world")
    cells: list[InWorld]
    pairs: list[Pair]
    lead: str = Field(description="the result in words")


def league_of(
    contents: Mapping[str, str], page: Path | None, lines: list[str], complete: bool | None = None
) -> dict[str, Any]:
    """Return the object for the tables of a league, by the names of their files; no table, no entry."""
    tables = {name: list(csv.DictReader(io.StringIO(text))) for name, text in contents.items() if name.endswith(".csv")}
    fresh = {row["entry"]: _figure(row, "fresh") for row in tables.get("fresh.csv", [])}
    cells = tables.get("league.csv", [])
    return League(
        page=None if page is None else str(page),
        complete=complete,
        worlds=list(dict.fromkeys(row["world"] for row in cells)),
        entries=[_entry(row, fresh.get(row["entry"])) for row in tables.get("aggregate.csv", [])],
        cells=list(map(_in_world, cells)),
        pairs=list(map(_pair, tables.get("pairs.csv", []))),
        lead=lines[0] if lines else "",
    ).model_dump(by_alias=True)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the object."""
    made = League.model_json_schema(by_alias=True, mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
    return {**head, **made, "title": "The answer of headwise league --json"}


def _entry(row: dict[str, str], fresh: Figure | None) -> Entry:
    return Entry(
        entry=row["entry"],
        kind=row["kind"],
        worlds=int(row["worlds"]),
        gain=_figure(row, "gain"),
        improvement=_figure(row, "improvement"),
        rank=_figure(row, "rank"),
        cost=_number(row["cost"]),
        better_in=int(row["better_in"]),
        worse_in=int(row["worse_in"]),
        fresh=fresh,
    )


def _in_world(row: dict[str, str]) -> InWorld:
    difference = Figure(value=_number(row["difference"]), low=_number(row["low"]), high=_number(row["high"]))
    return InWorld(
        world=row["world"],
        entry=row["entry"],
        arm=row["chosen"] or row["arm"] or None,
        state=row["status"],
        verdict=row["verdict"] or None,
        control_verdict=row["control_verdict"] or None,
        outcome=row["outcome"],
        difference=difference,
        p=_number(row["p"]),
        gain=_number(row["gain"]),
        runs=int(row["runs"] or 0),
        diverged=int(row["diverged"] or 0),
        reason=row["why"],
    )


def _pair(row: dict[str, str]) -> Pair:
    figures = {name: _figure(row, name) for name in ("gain", "over_first", "over_second")}
    return Pair(world=row["world"], pair=row["pair"], **figures)


def _figure(row: dict[str, str], name: str) -> Figure:
    return Figure(value=_number(row[name]), low=_number(row[f"{name}_low"]), high=_number(row[f"{name}_high"]))


def _number(text: str) -> float | None:
    return float(text) if text else None
