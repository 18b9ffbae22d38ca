"""Keep the results of a study as small files: tables as Markdown, the analysis as JSON, the table as CSV.

python docs/keep_results.py results/digits docs/results/digits
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from kept_curves import keep_curves

from headwise_verdict.files.errors import StudyError
from headwise_verdict.pages.formats import Unit, mebibytes, milliseconds, p_value, unit_named
from headwise_verdict.pages.shell import slug
from headwise_verdict.reporting.export import figures, svg
from headwise_verdict.reporting.optional_sections import phase_matrix
from headwise_verdict.reporting.outcome_texts import powers
from headwise_verdict.results.analysis_record import (
    AGAINST,
    HELD,
    Analysis,
    ClaimsRecord,
    FindingsRecord,
    Interval,
    JudgedClaim,
    JudgedPremise,
    TableRecord,
)
from headwise_verdict.results.folder import read_study
from headwise_verdict.results.records import EarlierVerdict, OutcomeNames, StudyRecord
from headwise_verdict.results.stored import checked_analysis, checked_findings, checked_study

CLAIMS = "claims.json"
# the file of every arm's differences, from which verdicts can be recomputed, and the file of every figure
DIFFERENCES, SEEDS = "differences.csv", "seeds.csv"
# largest numbers of kept figures and maps; the maps are those of the baseline's and first arm's first and last layer
MOST_FIGURES, MOST_MAPS = 10, 4
# a statistic of heads in a layer, or over all layers
DEPTHS = re.compile(r"heads/(?P<statistic>[^/]+)/(layer \d+|mean)")
HEAD = re.compile(r"heads/.+ head \d+")
WATCHED = re.compile(r"(watched|heads)/")
# evaluations whose figures are shown elsewhere or not at all
ASIDE = re.compile(r"(validation|train|gap|after \d+|task \d+)/")
# outcomes with a table in addition to the primary one, if recorded
KEPT = (
    "test/accuracy",
    "test/loss",
    "train/loss",
    "train/accuracy",
    "train/memorised",
    "train with methods/accuracy",
    "gap/accuracy",
)
# paragraphs of findings, above which those after the second follow the tables
WALL = 4


def keep(folder: Path, kept: Path, note: str = "") -> None:
    """Write README.md and copy the small files of a finished study, or of a study of findings, into `kept`.

    Raises:
        StudyError: if `folder` contains no finished study.
    """
    if (folder / "analysis.json").is_file():
        study, analysis = checked_study(folder / "study.json"), checked_analysis(folder / "analysis.json")
        told = _with_kept_history(analysis.claims, kept / CLAIMS, "run again")
        text, copied = study_page(folder, note, told), ("analysis.json", "table.csv")
        claims = ClaimsRecord(
            study=study.name, scale=study.scale, seeds=len(study.seeds), premises=analysis.premises, claims=told
        )
    elif (folder / "findings.json").is_file():
        findings = checked_findings(folder / "findings.json")
        # tables of numbers, and files that other pages quote, accompany the findings
        extra_files = (
            sorted(path.name for path in folder.glob("*.csv")) + ["alarms.json"] * (folder / "alarms.json").is_file()
        )
        told = _with_kept_history(findings.claims, kept / CLAIMS, "calculated again")
        text, copied = findings_page(findings, note, told), ("findings.json", *extra_files)
        claims = ClaimsRecord(study=findings.name, scale=findings.scale, claims=told)
    else:
        raise StudyError(f"{folder} contains neither analysis.json nor findings.json: run its study first.")
    kept.mkdir(parents=True, exist_ok=True)
    names = keep_figures(folder, kept, primary_figures(folder))
    if (folder / "analysis.json").is_file():
        names += keep_curves(folder, kept)
    text = with_figures(text, names)
    (kept / "README.md").write_text(text, encoding="utf-8")
    for name in copied:
        shutil.copyfile(folder / name, kept / name)
    if "analysis.json" in copied:
        leave_out_single_heads(kept)
        kept_analysis = checked_analysis(kept / "analysis.json")
        write_differences(kept, kept_analysis)
        write_seeds(folder, kept, list(kept_analysis.outcomes))
    if claims.claims:
        stored = json.dumps(claims.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
        (kept / CLAIMS).write_text(stored + "\n", encoding="utf-8")
    else:
        # those of an earlier run, of a study that claims nothing any more
        (kept / CLAIMS).unlink(missing_ok=True)


def with_history(claims: list[JudgedClaim], before: list[JudgedClaim], why: str) -> list[JudgedClaim]:
    """Return claims with the verdicts that they had in an earlier record; one that decided and changed is added."""
    old, told = {claim.text: claim for claim in before}, []
    for claim in claims:
        known = old.get(claim.text)
        history = list(known.before if known else claim.before)
        if known and known.verdict != claim.verdict and known.verdict in (*HELD, *AGAINST):
            history.append(EarlierVerdict(verdict=known.verdict, until=date.today().isoformat(), why=why))
        told.append(claim.model_copy(update={"before": history}))
    return told


def _with_kept_history(claims: list[JudgedClaim], path: Path, why: str) -> list[JudgedClaim]:
    """Return claims with the verdicts that they had in the file of an earlier run, if there was one."""
    if not claims or not path.is_file():
        return claims
    return with_history(claims, ClaimsRecord.model_validate_json(path.read_text(encoding="utf-8")).claims, why)


def write_differences(folder: Path, analysis: Analysis) -> None:
    """Write the differences of all kept outcomes by seed, from which all reported statistics can be recomputed."""
    with (folder / DIFFERENCES).open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["outcome", "arm", "seed", "difference"])
        for name in analysis.outcomes:
            for arm in analysis.compared:
                difference = arm.differences.get(name)
                rows.writerows(
                    [name, arm.label, seed, repr(value)]
                    for seed, value in (difference.by_seed if difference else {}).items()
                )


def write_seeds(folder: Path, kept: Path, outcomes: list[str]) -> None:
    """Write every figure of every arm by seed, including the baseline and diagnostics; missing figures have no line."""
    study = read_study(folder)
    with (kept / SEEDS).open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["outcome", "arm", "seed", "value"])
        cells = (
            (name, arm, seed)
            for name in [*outcomes, OutcomeNames.DIVERGED]
            for arm in study.arms
            for seed in study.seeds
        )
        figures = ((name, arm, seed, study.figure(arm, seed, name)) for name, arm, seed in dict.fromkeys(cells))
        rows.writerows([*cell, repr(value)] for *cell, value in figures if value is not None)


def primary_figures(folder: Path) -> list[str]:
    """Return the names of the figures to keep, at most `MOST_FIGURES`.

    They are the differences, divergence, the outcomes that decide claims, and maps; for findings, the first figures.
    """
    names = list(figures(folder))
    if not (folder / "analysis.json").is_file():
        return names[:MOST_FIGURES]
    analysis = checked_analysis(folder / "analysis.json")
    judged = [test.outcome for claim in analysis.claims for test in claim.tests]
    forest = slug(f"differences in {analysis.outcomes[analysis.primary].label}")
    chosen = [one for one in names if one.removeprefix("paired-") == forest][:1]
    chosen += [one for one in names if one.startswith("diverged")]
    for name in dict.fromkeys(name for name in (analysis.primary, *judged) if name in analysis.outcomes):
        # a statistic of heads is drawn over all depths in one figure
        statistic = _statistic(name).replace("_", "-") or slug(analysis.outcomes[name].label)
        prefixes = (f"{statistic}-mean-along-", f"{statistic}-along-", f"{statistic}-of-", f"{statistic}-by-depth")
        # a statistic with a single reading has no curve and is drawn under its own name
        prefixes = prefixes if any(one.startswith(prefixes) for one in names) else (statistic,)
        chosen += [
            one
            for prefix in prefixes
            for one in names
            if one == prefix or (prefix.endswith("-") and one.startswith(prefix))
        ]
    # watched statistics are drawn against the steps
    watched = dict.fromkeys(slug(name.split("/")[1].replace("_", " ")) for name in judged if WATCHED.match(name))
    chosen += [one for prefix in watched for one in names if one.startswith(prefix) and one.endswith("-by-step")]
    maps = [one for one in names if one.startswith("maps-")][:MOST_MAPS]
    return [*list(dict.fromkeys(chosen))[: MOST_FIGURES - len(maps)], *maps]


def keep_figures(folder: Path, kept: Path, names: list[str]) -> list[str]:
    """Write the named figures as SVG, delete those that the page of an earlier result shows, and return the names."""
    page = kept / "README.md"
    shown = re.findall(r"!\[[^\]]*\]\(([\w-]+)\.svg\)", page.read_text(encoding="utf-8")) if page.is_file() else []
    for old in shown:
        (kept / f"{old}.svg").unlink(missing_ok=True)
    specifications = figures(folder)
    for name in names:
        (kept / f"{name}.svg").write_text(svg(specifications[name]), encoding="utf-8")
    return names


def with_figures(text: str, names: list[str]) -> str:
    """Return a page with the figures after the claims and before the tables."""
    if not names:
        return text
    images = "\n\n".join(f"![{name.replace('-', ' ').capitalize()}]({name}.svg)" for name in names)
    parts = re.split(r"(?m)^(?=## )", text)
    at = 2 if len(parts) > 1 and parts[1].startswith("## Claims") else 1
    return "".join([*parts[:at], f"## Figures\n\n{images}\n\n", *parts[at:]])


def leave_out_single_heads(kept: Path) -> None:
    """Remove the figures of single heads, which fill most of the kept analysis and table; means by layer stay."""
    path, table = kept / "analysis.json", kept / "table.csv"
    analysis = json.loads(path.read_text(encoding="utf-8"))
    if any(HEAD.fullmatch(name) for name in analysis["outcomes"]):
        for part in (analysis, *analysis["arms"]):
            for field in ("outcomes", "metrics", "differences"):
                if isinstance(part.get(field), dict):
                    part[field] = {name: one for name, one in part[field].items() if not HEAD.fullmatch(name)}
        path.write_text(json.dumps(analysis, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        with table.open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if not HEAD.fullmatch(row[1])]
        with table.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows(rows)


def study_page(folder: Path, note: str = "", claims: list[JudgedClaim] | None = None) -> str:
    """Return the page of a study: answer, warnings and notes, tables, cost, settings, and how to repeat it.

    `claims` are those of the study with their earlier verdicts.
    """
    study, analysis = checked_study(folder / "study.json"), checked_analysis(folder / "analysis.json")
    lines = [f"# {study.title}", "", study.question, "", analysis.answer, ""]
    lines += [line for warning in [*analysis.warnings, *([note] if note else [])] for line in (warning, "")]
    lines += premises_table(analysis.premises) + claims_table(analysis.claims if claims is None else claims)
    for name in kept_outcomes(analysis):
        lines += outcome_table(analysis, name)
    lines += trend_table(analysis) + critical_table(analysis)
    lines += phase_tables(study, analysis)
    lines += depth_tables(analysis)
    lines += other_outcomes(analysis)
    if any(arm.runs.diverged for arm in analysis.arms):
        lines += divergence_table(analysis)
    lines += cost_table(analysis)
    lines += [line for text in study.notes for line in (text, "")]
    return "\n".join([*lines, *repeated(study, trained(folder))]) + "\n"


def trained(folder: Path) -> str:
    """Return the sentence on a study's number of runs and total training time."""
    files = list(folder.glob("runs/*/metrics.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines() if line]
    seconds = sum(line.get("seconds") or 0.0 for line in lines)
    return f"{len(files)} runs, {seconds / 60:.1f} minutes of training altogether." if seconds else ""


def kept_outcomes(analysis: Analysis) -> list[str]:
    """Return the outcomes that get a table: the primary one, the usual ones, those that decide a claim, and alerts."""
    judged = [test.outcome for claim in analysis.claims for test in claim.tests]
    # if a claim tests a statistic of many matrices or heads, the table by depth is shorter
    many = {name for name, times in Counter(map(_statistic, dict.fromkeys(judged))).items() if name and times > 4}
    judged = [name for name in judged if _statistic(name) not in many]
    alerts = [name for name, outcome in analysis.outcomes.items() if outcome.kind == "alerts"]
    return list(
        dict.fromkeys(name for name in (analysis.primary, *KEPT, *judged, *alerts) if name in analysis.outcomes)
    )


def _statistic(outcome: str) -> str:
    return outcome.split("/")[1] if outcome.startswith("heads/") else ""


def findings_page(findings: FindingsRecord, note: str = "", claims: list[JudgedClaim] | None = None) -> str:
    """Return the page of a study of findings: its answer, its tables, how it was found and how to repeat it."""
    lines = [f"# {findings.title}", "", findings.question, ""]
    answer, how = findings.paragraphs, []
    if len(answer) > WALL:
        answer, how = answer[:2], answer[2:]
    lines += [line for text in [*answer, *([note] if note else [])] for line in (text, "")]
    lines += claims_table(findings.claims if claims is None else claims)
    for table in findings.tables:
        lines += [f"## {table.title}", "", *findings_table(table), ""]
    lines += [line for text in ["## How it was found", *how] for line in (text, "")] if how else []
    took = "" if findings.seconds is None else f"It took {findings.seconds / 60:.1f} minutes."
    return "\n".join([*lines, *repeated(findings, took)]) + "\n"


ALONE = (
    "Each interval is that of its test alone; those of the differences in the tables below hold for all arms together, "
    "and are wider."
)


def claims_table(claims: list[JudgedClaim]) -> list[str]:
    """Return the lines of the table of claims: published figures, figures measured here, and verdict."""
    if not claims:
        return []
    rows = []
    for claim in claims:
        verdict = f"**{claim.verdict_words}**" + (f": {claim.why}" if claim.why else "")
        verdict += f" ({claim.history_words})" if claim.history_words else ""
        statement = f"{claim.text} ({claim.source})" if claim.source else claim.text
        rows.append([statement, claim.published_words or "–", claim.ours or "–", verdict])
    return ["## Claims", "", ALONE, "", *_table(["claim", "published", "ours [95 %]", "verdict"], rows), ""]


def premises_table(premises: list[JudgedPremise]) -> list[str]:
    """Return the lines of the table of premises."""
    rows = [
        [one.text or one.name, one.ours or "–", f"**{one.state}**" if one.holds is False else one.state]
        for one in premises
    ]
    return ["## Premises", "", *_table(["premise", "ours [95 %]", "here"], rows), ""] if rows else []


def outcome_table(analysis: Analysis, name: str) -> list[str]:
    """Return the lines of one outcome's table."""
    outcome = analysis.outcomes[name]
    unit = unit_named(outcome.unit)
    rows = []
    for arm in analysis.arms:
        difference = arm.differences.get(name)
        rows.append(
            [f"`{arm.label}`", _interval(arm.metrics.get(name), unit), _interval(difference, unit, signed=True)]
        )
        p = p_value(difference.p_corrected) if difference else None
        rows[-1] += [p or "–", (difference.verdict_text or difference.verdict) if difference else "–"]
    title = outcome.label[:1].upper() + outcome.label[1:] + (f" ({unit.name})" if unit.name else "")
    head = ["arm", "mean [95 %]", "paired difference [95 %]", "corrected p", "verdict"]
    return [f"## {title}", "", *_table(head, rows), ""]


def trend_table(analysis: Analysis) -> list[str]:
    """Return the lines of the table of kept outcomes' trends along each axis; empty if the study has no axis."""
    rows = []
    for trend in analysis.trends:
        if trend.outcome not in kept_outcomes(analysis) or trend.step is None:
            continue
        outcome = analysis.outcomes[trend.outcome]
        unit = unit_named(outcome.unit)
        best = "–" if trend.best is None else f"{trend.best:g} ({'inside' if trend.inside else 'at an end'})"
        change = f"{unit.number(trend.step, signed=True)} {unit.difference}".rstrip()
        rows.append([trend.axis, outcome.label, change, p_value(trend.p) or "–", p_value(trend.page) or "–", best])
    head = ["axis", "outcome", "change from one value to the next", "p (sign flips)", "p (Page)", "best at"]
    return ["## Along the axes", "", *_table(head, rows), ""] if rows else []


def critical_table(analysis: Analysis) -> list[str]:
    """Return the lines of the table of critical learning rates; empty if no rate was swept."""
    rows = [
        [
            f"`{one.axis}`",
            powers(one.mean, one.low, one.high) or "–",
            powers(one.difference, one.difference_low, one.difference_high) or "–",
            p_value(one.p) or "–",
            str(one.n),
        ]
        for one in analysis.critical_rates
    ]
    head = ["sweep", "critical rate [95 %]", "times that of the first [95 %]", "corrected p", "seeds"]
    note = "By seed: halfway, in log10, between the first rate at which the run diverges and the one below."
    return ["## Critical learning rate", "", *_table(head, rows), "", note, ""] if rows else []


def phase_tables(study: StudyRecord, analysis: Analysis) -> list[str]:
    """Return a table for each arm of the primary metric by evaluation and phase; empty with a single phase."""
    matrix = phase_matrix(study, analysis)
    if matrix is None:
        return []
    unit, lines = unit_named(analysis.metric.unit), []
    for arm in analysis.arms:
        rows = [
            [phase, *(unit.number(matrix.entry(arm, phase, evaluation)) or "–" for evaluation in matrix.evaluations)]
            for phase in matrix.phases
        ]
        title = f"{matrix.metric.capitalize()} ({unit.name or 'mean'}) after each phase: `{arm.label}`"
        lines += [f"## {title}", "", *_table(["phase", *matrix.evaluations], rows), ""]
    return lines


def depth_tables(analysis: Analysis) -> list[str]:
    """Return a table for each statistic of heads: its means over seeds by layer and overall, one row per arm."""
    by_statistic: dict[str, list[str]] = {}
    for name in analysis.outcomes:
        if (match := DEPTHS.fullmatch(name)) is not None:
            by_statistic.setdefault(match["statistic"], []).append(name)
    lines = []
    for statistic, names in by_statistic.items():
        rows = [
            [
                f"`{arm.label}`",
                *(_four_digits(arm.metrics[name].mean if name in arm.metrics else None) for name in names),
            ]
            for arm in analysis.arms
        ]
        head = ["arm", *(name.rpartition("/")[2] for name in names)]
        lines += [f"## {statistic.replace('_', ' ').capitalize()} by depth", "", *_table(head, rows), ""]
    return lines


def other_outcomes(analysis: Analysis) -> list[str]:
    """Return the table of means of all outcomes without their own table: other metrics, conditions, matrices."""
    with_tables = set(kept_outcomes(analysis))
    rows = []
    for name, outcome in analysis.outcomes.items():
        if name in with_tables or any(pattern.match(name) for pattern in (ASIDE, HEAD, DEPTHS)):
            continue
        unit = unit_named(outcome.unit)
        means = (arm.metrics[name].mean if name in arm.metrics else None for arm in analysis.arms)
        label = f"{outcome.label} ({unit.name})" if unit.name else outcome.label
        rows.append([label, *("–" if mean is None else unit.number(mean) for mean in means)])
    head = ["outcome", *(f"`{arm.label}`".replace("|", "\\|") for arm in analysis.arms)]
    return ["## Other outcomes, means over seeds", "", *_table(head, rows), ""] if rows else []


def divergence_table(analysis: Analysis) -> list[str]:
    """Return the lines of the table of diverged runs by arm."""
    rows = []
    for arm in analysis.arms:
        test, ended = arm.divergence, arm.runs.finished + len(arm.runs.diverged)
        cells = [p_value(test.p_corrected) or "–", test.verdict] if test else ["–", "–"]
        rows.append([f"`{arm.label}`", f"{len(arm.runs.diverged)} of {ended}", *cells])
    return ["## Diverged runs", "", *_table(["arm", "diverged", "corrected p", "verdict"], rows), ""]


def cost_table(analysis: Analysis) -> list[str]:
    """Return the lines of the table of costs; missing figures are dashes."""
    rows = []
    for arm in analysis.arms:
        costs, parameters = arm.costs, arm.costs.get("parameters")
        figures = [milliseconds(costs.get("seconds_per_step")), mebibytes(costs.get("peak_memory_bytes"))]
        figures.append(None if parameters is None else f"{parameters:,.0f}")
        rows.append([f"`{arm.label}`", *(figure or "–" for figure in figures)])
    note = ["Other runs shared the processor while times were measured.", ""] if analysis.cost_is_indicative else []
    return ["## Cost", "", *_table(["arm", "time of a step", "memory of a step", "parameters"], rows), "", *note]


def findings_table(table: TableRecord) -> list[str]:
    """Return a table of findings as Markdown."""
    return _table(table.columns, [["–" if cell is None else str(cell) for cell in row] for row in table.rows])


def repeated(study: StudyRecord | FindingsRecord, took: str = "") -> list[str]:
    """Return the lines on the settings, command, versions and hardware of a result, "unknown" where not recorded."""
    command = study.command if isinstance(study.command, str) else " ".join(study.command)
    # the folders of results and data are not part of the result
    command = re.sub(r" --(out|data) \S+", "", command)
    hardware = study.hardware or {}
    processor = f"{hardware.get('processor', 'unknown')}, {hardware.get('cores', 'unknown')} cores"
    parts = [f"Command: `{command}`.", f"Versions: {_listed(study.versions)}.", f"Hardware: {processor}."]
    parts += [took] if took else []
    parts.append(_commits(study))
    scale = [f"Scale: {study.scale}."] if study.scale else []
    return [" ".join([*scale, f"Settings: {_listed(study.settings)}."]), "", " ".join(parts)]


def _commits(study: StudyRecord | FindingsRecord) -> str:
    runs: Counter[str] = Counter()
    for environment in study.environments if isinstance(study, StudyRecord) else []:
        runs[(environment.commit or "unknown")[:12]] += environment.runs
    if len(runs) > 1:
        return f"Commits {', '.join(f'{commit} ({count} runs)' for commit, count in runs.items())}."
    return f"Commit {(study.commit or 'unknown')[:12]}."


def _listed(values: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items() if value is not None) or "unknown"


def _interval(record: Interval | None, unit: Unit, *, signed: bool = False) -> str:
    if record is None or record.mean is None:
        return "–"
    return f"{unit.number(record.mean, signed=signed)} {unit.interval(record.low, record.high, signed=signed)}".strip()


def _four_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    # an arm's text contains a bar if it changes the recipe
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    """Read the command line and keep the results that it names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a finished study")
    parser.add_argument("kept", type=Path, help="where to keep its results")
    parser.add_argument("--note", default="", help="a note on the result, shown below its answer")
    options = parser.parse_args()
    try:
        keep(options.folder, options.kept, options.note)
    except StudyError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
