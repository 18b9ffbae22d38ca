"""Tabulate every kept study in which a method ran: its effect with the interval, the verdict, and the world."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from claims_placed import Placed, kept_claims
from which_method import League, read, result

from headwise_verdict.pages.formats import unit_named
from headwise_verdict.reporting.answer_table import plain_verdict
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis, Difference
from headwise_verdict.results.differences import paired_differences
from headwise_verdict.results.folder import RunFolder, StudyFolder
from headwise_verdict.results.records import RunResult, StudyRecord
from headwise_verdict.results.stored import checked_analysis

RESULTS = Path(__file__).resolve().parents[1] / "results"
NOTE = (
    "Every kept study in which the method ran: its difference from the plain model in the outcome that decides the "
    "study, with intervals of 95 % that hold for all arms of the study jointly. An arm that also changes the recipe is "
    "compared with the plain model after the same change, if the study has it. An arm that combines methods is listed "
    "on the page of each."
)
LEAGUE = (
    "In [the first edition of the league](../../wide_league.md), a table without advice: every method had six trials, "
    "and so had the plain model, too few to find its best rate in *Sentences*; *Memorised words* leaves no room for a "
    "gain. Intervals hold for all entries of a world jointly; the time of a step is in steps of the plain model:"
)
NONE = "No kept study ran it, so that its effect on a training is not known here."


def results_of(name: str, results: Path = RESULTS) -> str:
    """Return the measurements of a method as Markdown: one row per study and arm, and calculations below."""
    rows = [row for folder, analysis in _analyses(results) for row in _rows(name, folder, analysis)]
    parts = []
    if rows:
        head = ["world", "arm", "against", "outcome", "difference [95 %]", "verdict", "study"]
        parts += [NOTE, _table(head, rows)]
    if found := _of_league(name, results.parent / "league"):
        head = ["world", "difference [95 %]", "verdict", "against the best control", "step", "chosen by its search"]
        parts += [LEAGUE, _table(head, found)]
    if found := _calculated(name, results):
        parts += ["Calculated or measured without training:", _table(["claim", "ours", "verdict", "study"], found)]
    return "\n\n".join(parts or [NONE])


@cache
def _analyses(results: Path) -> list[tuple[Path, Analysis]]:
    return [(path.parent, checked_analysis(path)) for path in sorted(results.glob("*/analysis.json"))]


def _rows(name: str, folder: Path, analysis: Analysis) -> list[list[str]]:
    world = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    metric, found = analysis.metric, []
    unit = unit_named(metric.unit)
    failed_premises = [one.text or one.name for one in analysis.premises if one.holds is False]
    others = f" (and {len(failed_premises) - 1} more)" if len(failed_premises) > 1 else ""
    failed = f"; a premise failed: {failed_premises[0]}{others}" if failed_premises else ""
    for arm in analysis.compared:
        if analysis.primary not in arm.differences or not re.search(rf"\b{name}\(", arm.label):
            continue
        against, entry = held_against(arm, analysis)
        number = unit.number(entry.mean, signed=True) or "diverged"
        shown = f"{number} {unit.difference} {unit.interval(entry.low, entry.high, signed=True)}".replace("  ", " ")
        good = {True: " (higher is better)", False: " (lower is better)", None: ""}[metric.higher_is_better]
        seeds = f"{world}, {len(analysis.seeds)} seeds"
        found.append(
            [
                seeds,
                f"`{arm.label}`",
                f"`{against}`",
                f"{metric.label}{good}",
                shown.strip(),
                plain_verdict(entry, unit) + failed,
                _link(folder.name),
            ]
        )
    return found


@cache
def _league(kept: Path) -> League | None:
    return read(kept) if (kept / "league.csv").exists() else None


def _of_league(name: str, kept: Path) -> list[list[str]]:
    league = _league(kept)
    if league is None:
        return []
    found = []
    for world in league.run:
        unit, higher, label = league.unit(world)
        title = f"{league.worlds[world]['title']}: {label} ({'higher' if higher else 'lower'} is better)"
        found += [[title, *result(row, unit)] for row in league.of(world) if re.search(rf"\b{name}\(", row["arm"])]
    return found


def held_against(arm: ArmAnalysis, analysis: Analysis) -> tuple[str, Difference]:
    """Return the arm to compare with, and the difference: the plain arm with the same changes of the recipe if the
    study has it, else the baseline."""
    ours, changes = arm.differences[analysis.primary], arm.label.partition(" | ")[2]
    plain = next(
        (one for one in analysis.compared if changes and one.label == f"{analysis.baseline} | {changes}"), None
    )
    if plain is None:
        return analysis.baseline, ours
    metric, theirs = analysis.metric, plain.differences[analysis.primary].by_seed
    record = StudyRecord(
        arms=[plain.label, arm.label], baseline=plain.label, seeds=analysis.seeds, primary=analysis.primary, metrics=[]
    )
    runs = {}
    # both are differences from the baseline, which cancels in the difference of the two
    for label, figures in ((plain.label, theirs), (arm.label, ours.by_seed)):
        for seed, value in figures.items():
            metrics = {analysis.primary: value}
            done = RunResult(status="finished", arm=label, seed=int(seed), hash="0", metrics=metrics, format=2)
            runs[label, int(seed)] = RunFolder(label, int(seed), Path(), done)
    study = StudyFolder(Path(), record, runs)
    return plain.label, paired_differences(study, analysis.primary, metric.higher_is_better)[arm.label]


def _calculated(name: str, results: Path) -> list[list[str]]:
    found = []
    for study, record in kept_claims(results).items():
        if (results / study / "analysis.json").is_file():
            continue
        for claim in record.claims:
            if name in Placed(study, record.scale, record.seeds, claim).methods:
                verdict = "; ".join(filter(None, [claim.verdict_words, claim.history_words]))
                found.append([claim.text, claim.ours or "–", verdict, _link(study)])
    return found


def _link(study: str) -> str:
    return f"[{study}](../../results/{study}/README.md)"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)
