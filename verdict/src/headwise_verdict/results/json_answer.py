"""What `headwise compare --json` and `headwise report --json` print: the verdicts, without prose to parse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headwise_verdict.results.across import Aggregate
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis, ArmVerdict, Difference, JudgedClaim, Verdict
from headwise_verdict.results.records import ClaimKind
from headwise_verdict.results.stored import checked_analysis, checked_findings, checked_study

# increased when a field changes its meaning or goes
SCHEMA: Literal["headwise.results/1"] = "headwise.results/1"


class _Shown(BaseModel):
    """A part of the object; its fields are those of the schema, all of them always present."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class ShownDifference(_Shown):
    """An arm minus the baseline in the deciding outcome, over pairs of runs with the same seed."""

    mean: float | None = Field(description="in the unit of the outcome")
    low: float | None = Field(description="lower end of the 95 % interval, which holds for all arms together")
    high: float | None = Field(description="upper end")
    p: float | None = Field(description="corrected for the number of arms")
    pairs: int = Field(ge=0)
    paired: bool = Field(description="false: initial weights or data differ, and only means are compared")
    detectable: float | None = Field(description="the difference that is detected with 80 % power")


class ShownRuns(_Shown):
    """How many runs of an arm were requested, finished and diverged."""

    requested: int = Field(ge=0)
    finished: int = Field(ge=0)
    diverged: int = Field(ge=0)


class ShownArm(_Shown):
    """One arm: its runs, its mean over seeds, and its verdict against the baseline."""

    arm: str
    verdict: ArmVerdict | None = Field(description="against the baseline; null: the baseline itself")
    mean: float | None = Field(description="over seeds, in the unit of the outcome; null: no run has a figure")
    low: float | None = Field(description="lower end of the mean's own 95 % interval")
    high: float | None = Field(description="upper end")
    difference: ShownDifference | None = Field(description="null: the baseline itself")
    runs: ShownRuns
    seconds_per_step: float | None = Field(description="median over seeds")


class ShownEarlier(_Shown):
    """A verdict that a claim had until a premise, a margin or a setting was stated after its runs."""

    verdict: str
    until: str = Field(description="the day on which the claim was judged otherwise, YYYY-MM-DD")
    reason: str


class ShownClaim(_Shown):
    """A published claim that the study tests, and its verdict."""

    claim: str
    source: str
    kind: ClaimKind = Field(description="what is not measured shows less, and is counted apart")
    verdict: Verdict
    reason: str
    before: list[ShownEarlier]


class ShownStudy(_Shown):
    """The answer of one study."""

    name: str
    folder: str
    report: str
    complete: bool = Field(description="false: runs are missing; the same command adds them")
    missing: list[dict[str, str | int]] = Field(description="arm and seed of each missing run")
    outcome: str | None = Field(description="the outcome that decides; null: a study of findings, which has no arms")
    unit: str = Field(description="unit of the outcome; % means that 0.01 is one percentage point")
    better: Literal["higher", "lower"] | None = Field(description="null: neither direction is better")
    baseline: str | None
    seeds: int | None
    margin: float | None = Field(description="differences up to this size are equivalent")
    arms: list[ShownArm]
    claims: list[ShownClaim]
    warnings: list[str] = Field(description="reasons to doubt the study, and notes on its runs")
    answer: str = Field(description="the same in words")


class ShownAggregate(_Shown):
    """An arm's mean standardised difference over several studies; positive is better."""

    arm: str
    mean: float
    low: float
    high: float
    studies: int = Field(ge=2)


class Results(_Shown):
    """The object that the commands print."""

    schema_: Literal["headwise.results/1"] = Field(default=SCHEMA, alias="schema")
    studies: list[ShownStudy]
    across: list[ShownAggregate] = Field(description="arms that all studies share; empty for one study")


def results_of(folders: Sequence[Path], across: Mapping[str, Aggregate] | None = None) -> dict[str, Any]:
    """Return the object for the folders of studies whose reports are written.

    Raises:
        ValueError: naming a file of a folder that is damaged.
    """
    aggregates = [
        ShownAggregate(arm=arm, mean=one.mean, low=one.low, high=one.high, studies=one.data_sets)
        for arm, one in (across or {}).items()
    ]
    return Results(studies=[_study(folder) for folder in folders], across=aggregates).model_dump(by_alias=True)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the object."""
    made = Results.model_json_schema(by_alias=True, mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
    return {**head, **made, "title": "The answer of headwise compare --json and headwise report --json"}


def _study(folder: Path) -> ShownStudy:
    place = {"folder": str(folder), "report": str(folder / "report.html")}
    if not (folder / "study.json").is_file():
        found = checked_findings(folder / "findings.json")
        return ShownStudy(
            **place,
            name=found.name or folder.resolve().name,
            complete=True,
            missing=[],
            outcome=None,
            unit="",
            better=None,
            baseline=None,
            seeds=None,
            margin=None,
            arms=[],
            claims=list(map(_claim, found.claims)),
            warnings=found.notes,
            answer=" ".join(found.paragraphs[:1]),
        )
    analysis, study = checked_analysis(folder / "analysis.json"), checked_study(folder / "study.json")
    better = {True: "higher", False: "lower", None: None}[analysis.metric.higher_is_better]
    return ShownStudy(
        **place,
        name=study.name or folder.resolve().name,
        complete=analysis.complete,
        missing=[{"arm": cell.arm, "seed": cell.seed} for cell in analysis.missing],
        outcome=analysis.primary,
        unit=analysis.metric.unit,
        better=better,
        baseline=analysis.baseline,
        seeds=len(analysis.seeds),
        margin=_plain(analysis.margin),
        arms=[_arm(arm, analysis) for arm in analysis.arms],
        claims=list(map(_claim, analysis.claims)),
        warnings=[*analysis.warnings, *(run.words for run in analysis.damaged), *study.notes],
        answer=analysis.answer,
    )


def _arm(arm: ArmAnalysis, analysis: Analysis) -> ShownArm:
    mean, entry = arm.metrics[analysis.primary], arm.differences.get(analysis.primary)
    runs = ShownRuns(requested=arm.runs.asked, finished=arm.runs.finished, diverged=len(arm.runs.diverged))
    return ShownArm(
        arm=arm.label,
        verdict=None if entry is None else entry.verdict,
        mean=_plain(mean.mean),
        low=_plain(mean.low),
        high=_plain(mean.high),
        difference=None if entry is None else _difference(entry),
        runs=runs,
        seconds_per_step=_plain(arm.costs.get("seconds_per_step")),
    )


def _difference(entry: Difference) -> ShownDifference:
    return ShownDifference(
        mean=_plain(entry.mean),
        low=_plain(entry.low),
        high=_plain(entry.high),
        p=_plain(entry.p_corrected),
        pairs=entry.n,
        paired=entry.paired,
        detectable=_plain(entry.detectable),
    )


def _claim(claim: JudgedClaim) -> ShownClaim:
    earlier = [ShownEarlier(verdict=one.verdict, until=one.until, reason=one.why) for one in claim.before]
    return ShownClaim(
        claim=claim.text, source=claim.source, kind=claim.kind, verdict=claim.verdict, reason=claim.why, before=earlier
    )


def _plain(value: float | None) -> float | None:
    """Return a number, or None for one that JSON cannot express: an end that is not bounded."""
    return value if value is not None and math.isfinite(value) else None
