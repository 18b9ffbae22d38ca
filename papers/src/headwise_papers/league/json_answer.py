"""What `headwise league --json` prints: how far each world is, and the tables of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headwise_papers.league.contest import Contest
from headwise_papers.league.contest_tables import tables

# increased when a field changes its meaning or goes
SCHEMA: Literal["headwise.league/2"] = "headwise.league/2"


class _Shown(BaseModel):
    """A part of the object; its fields are those of the schema, all of them always present."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class WorldShown(_Shown):
    """How far a world is."""

    world: str
    symptom: str
    state: Literal["not run", "under way", "failed", "complete"] = Field(description="failed: a premise does not hold")
    runs: int
    left_out: dict[str, str] = Field(description="contestants that the world refuses or that failed, with the reason")


class PremiseShown(_Shown):
    """A premise of a world whose runs for it are made."""

    world: str
    premise: str
    says: str
    figure: float
    level: float
    holds: bool


class GainShown(_Shown):
    """A contestant in a complete world. Gains are shares of the errors that it avoids, with their 95 % interval."""

    world: str
    contestant: str
    kind: str
    arm: str
    rate: float
    inside: bool = Field(description="whether the rate is inside the range that was searched")
    validation_error: float
    test_error: float
    diverged: int
    mean: float = Field(description="against the best plain model")
    low: float
    high: float
    control_mean: float | None = Field(description="against the best control; null: there is none")
    control_low: float | None
    control_high: float | None


class MeanShown(_Shown):
    """A contestant over the worlds of a symptom."""

    symptom: str
    contestant: str
    worlds: int
    mean: float
    low: float
    high: float
    new_low: float = Field(description="lower end for a new world")
    new_high: float
    tau2: float = Field(description="variance between worlds")
    advice: str = Field(description='"try first", "candidate" or empty')


class TurnShown(_Shown):
    """A world left out: what all others of its symptom choose, and what it gains there."""

    symptom: str
    left_out: str
    chosen: str
    mean: float
    low: float
    high: float
    control_mean: float | None
    control_low: float | None
    control_high: float | None
    carried: bool


class LeagueShown(_Shown):
    """The object that the command prints."""

    schema_: Literal["headwise.league/2"] = Field(default=SCHEMA, alias="schema")
    page: str | None = Field(description="null: without --page")
    complete: bool = Field(description="whether no run is missing")
    worlds: list[WorldShown]
    premises: list[PremiseShown]
    gains: list[GainShown]
    symptoms: list[MeanShown]
    transfer: list[TurnShown]


def league_of(contests: Sequence[Contest], page: Path | None = None) -> dict[str, Any]:
    """Return the object of these worlds."""
    worlds = [
        {
            "world": one.world.name,
            "symptom": one.world.symptom,
            "state": one.state,
            "runs": len(one.ledger.runs),
            "left_out": one.ledger.notes,
        }
        for one in contests
    ]
    # a table has "" where it has no figure
    rows = {
        name: [{key: None if value == "" and key != "advice" else value for key, value in row.items()} for row in some]
        for name, some in tables(contests).items()
    }
    complete = all(one["state"] in ("complete", "failed") for one in worlds)
    shown = LeagueShown.model_validate(
        {"page": None if page is None else str(page), "complete": complete, "worlds": worlds, **rows}
    )
    return shown.model_dump(by_alias=True, mode="json")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the object."""
    made = LeagueShown.model_json_schema(by_alias=True, mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
    return {**head, **made, "title": "The answer of headwise league --json"}
