"""Findings: measurements of a study without trained arms, judged by the tests of its claims like runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise_verdict.files.errors import count
from headwise_verdict.results.analysis_record import KINDS_COUNTED, JudgedClaim
from headwise_verdict.results.claims import judged_claims
from headwise_verdict.results.folder import RunFolder, StudyFolder
from headwise_verdict.results.intervals import interval
from headwise_verdict.results.records import Claim, ClaimTest, MetricRecord, RunResult, StudyRecord

# by subject, the figures by name in every repeat; those of a calculation without randomness are one mapping, repeated
Figures = Mapping[str, Sequence[Mapping[str, float]]]
# the rounding of double precision; a smaller error counts as none
ROUNDING = 2.0**-52


def findings(
    name: str,
    title: str,
    question: str,
    figures: Figures,
    claims: Sequence[Claim],
    *,
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
    tables: Sequence[dict[str, Any]] = (),
    charts: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the content of findings.json: verdicts of the claims, a table of all figures, and the study's own parts.

    `labels` describes each figure, as "words (unit)" or "words".
    """
    judged = judged_claims(measured(name, figures, [_calculated(claim) for claim in claims], labels))
    return {
        "kind": "findings",
        "name": name,
        "scale": "small",
        "title": title,
        "question": question,
        "paragraphs": [*([answer(judged)] if judged else []), *notes],
        "claims": [claim.model_dump(mode="json") for claim in judged],
        "tables": [_table(figures, labels), *tables],
        # every figure, from which the verdicts can be recomputed
        "figures": {subject: [dict(repeat) for repeat in repeated] for subject, repeated in figures.items()},
        "charts": list(charts),
        "settings": dict(settings),
    }


def _calculated(claim: Claim) -> Claim:
    return claim.model_copy(update={"kind": "calculation"}) if claim.kind == "measured" else claim


def measured(name: str, figures: Figures, claims: Sequence[Claim], labels: Mapping[str, str]) -> StudyFolder:
    """Return the figures as a study from which claims are judged, with subjects as arms and repeats as seeds."""
    subjects, repeats = list(figures), range(max(map(len, figures.values())))
    metrics = [
        MetricRecord(name=key, label=label.partition(" (")[0], unit=_unit(label), higher_is_better=False)
        for key, label in labels.items()
    ]
    study = StudyRecord(
        name=name,
        scale="small",
        arms=subjects,
        baseline=subjects[0],
        seeds=list(repeats),
        primary=metrics[0].name,
        metrics=metrics,
        claims=list(claims),
    )
    runs = {
        (arm, seed): RunFolder(
            arm,
            seed,
            Path(),
            RunResult(status="finished", arm=arm, seed=seed, hash="", metrics=dict(metrics_of_repeat)),
        )
        for arm, repeated in figures.items()
        for seed, metrics_of_repeat in enumerate(repeated)
    }
    calculated = [arm for arm, repeated in figures.items() if all(one is repeated[0] for one in repeated)]
    return StudyFolder(Path(), study, runs, calculated=calculated)


def answer(claims: Sequence[JudgedClaim]) -> str:
    """Return the sentence on the numbers of claims by kind and verdict, and the contradicted claims."""
    counts = Counter(
        f"{claim.verdict} ({KINDS_COUNTED[claim.kind]})" if claim.kind in KINDS_COUNTED else claim.verdict
        for claim in claims
    )
    parts = ", ".join(f"{many} {verdict}" for verdict, many in counts.items())
    words = f"Of {count(len(claims), 'claim')} {parts}."
    return " ".join([words, *(f"Contrary: {claim.text}" for claim in claims if claim.verdict == "contrary")])


def decades(error: float) -> float:
    """Return log10 of an error's absolute value, at least that of 2⁻⁵²."""
    return math.log10(max(abs(error), ROUNDING))


def each(arms: Iterable[str], outcome: str, says: Any, level: float, margin: float | None = None) -> list[ClaimTest]:
    """Return a test for every arm that an outcome is below ("lower"), above ("higher") or equal to ("same") a level."""
    return [ClaimTest(arm=arm, outcome=outcome, says=says, level=level, margin=margin) for arm in arms]


def _table(figures: Figures, labels: Mapping[str, str]) -> dict[str, Any]:
    rows = [
        [subject, label, len(values), _span(values)]
        for subject, repeated in figures.items()
        for key, label in labels.items()
        if (values := [figures_of_repeat[key] for figures_of_repeat in repeated if key in figures_of_repeat])
    ]
    return {"title": "Means over repeats", "columns": ["of", "figure", "repeats", "mean [95 %]"], "rows": rows}


def _span(values: Sequence[float]) -> str:
    mean = interval(values)
    exact = mean.low is None or mean.low == mean.high
    return f"{mean.mean:.4g}" + ("" if exact else f" [{mean.low:.4g}, {mean.high:.4g}]")


def _unit(label: str) -> str:
    return label.partition(" (")[2].removesuffix(")")
