"""The tables of a report as CSV with raw numbers, and as Markdown and LaTeX with rounded ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from headwise_verdict.files.foreign_text import as_cell
from headwise_verdict.pages.formats import MINUS, Unit, p_value
from headwise_verdict.reporting.answer_table import COSTS, gap_of, measured_costs, run_counts
from headwise_verdict.reporting.outcome_texts import unit_of
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis, Difference, FindingsRecord
from headwise_verdict.results.folder import StudyFolder

# fields of a difference in table.csv, after its mean and interval
FIELDS = ("n", "p", "p_corrected", "verdict_text", "detectable", "within", "p_equivalent", "pairing")


def study_csv(analysis: Analysis) -> str:
    """Return a CSV of one row per arm and outcome, unrounded: shares in [0, 1], losses in nats, missing figures ""."""
    header = ["arm", "outcome", "mean", "low", "high", "difference", "difference_low", "difference_high", "pairs"]
    header += [*FIELDS[1:], "finished", "diverged", "missing"]
    rows: list[list[Any]] = [header]
    for name in analysis.outcomes:
        for arm in analysis.arms:
            mean, entry = arm.metrics[name], arm.differences.get(name)
            figures = [getattr(entry, key) if entry else None for key in ("mean", "low", "high", *FIELDS)]
            counts = [arm.runs.finished, len(arm.runs.diverged), len(arm.runs.missing)]
            rows.append([arm.label, name, mean.mean, mean.low, mean.high, *figures, *counts])
    return as_csv(rows)


def runs_csv(study: StudyFolder) -> str:
    """Return a CSV of one row per run with every outcome and cost, unrounded; figures not recorded are empty."""
    results = [run.result for run in study.runs.values() if run.result]
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    rows: list[list[Any]] = [["arm", "seed", "run", "status", "diverged_at_step", *names]]
    for arm in study.arms:
        for run in study.of(arm):
            result = run.result
            divergence = result.divergence if result else None
            figures = [result.metrics.get(name) if result else None for name in names]
            rows.append([arm, run.seed, run.path.name, run.status, divergence.step if divergence else None, *figures])
    return as_csv(rows)


def epochs_csv(study: StudyFolder) -> str:
    """Return a CSV of one row per run and epoch (of a script, per point of its curves) with its figures, unrounded."""
    # a line of a script is one or several points of its curves, and no epoch
    unit = "point" if study.study.by_step else "epoch"
    runs = [run for arm in study.arms for run in study.of(arm)]
    names = list(dict.fromkeys(name for run in runs for line in run.epochs for name in line.metrics))
    rows: list[list[Any]] = [["arm", "seed", "run", unit, "phase", "step", "learning_rate", "seconds", *names]]
    for run in runs:
        for line in run.epochs:
            known = [line.epoch, line.phase, line.step, line.learning_rate, line.seconds]
            rows.append([run.arm, run.seed, run.path.name, *known, *(line.metrics.get(name) for name in names)])
    return as_csv(rows)


def study_markdown(analysis: Analysis) -> str:
    """Return the answer sentence and the table as Markdown."""
    return f"{escape(analysis.answer)}\n\n{_markdown(*_answer(analysis))}"


def study_latex(analysis: Analysis) -> str:
    """Return a LaTeX table (booktabs) of the answer, and one of each other outcome."""
    header, rows = _answer(analysis)
    tables = [_latex(analysis.metric.label, header, rows, analysis.answer)]
    for outcome in list(analysis.outcomes.values())[1:]:
        if outcome.kind == "methods":
            # the baseline has no such parameters, so there is no difference
            continue
        unit = unit_of(outcome)
        head = ["arm", *_headings(outcome.label, unit)]
        body = [[_code(arm.label), *_figures(arm, outcome.name, unit)] for arm in analysis.arms]
        tables.append(_latex(outcome.label, head, body))
    return "\n".join(["% needs \\usepackage{booktabs}", *tables])


def findings_csv(findings: FindingsRecord) -> str:
    """Return the tables of findings as one CSV, each under a line with its title."""
    rows: list[list[Any]] = []
    for record in findings.tables:
        rows += [*([[]] if rows else []), [record.title], record.columns, *record.rows]
    return as_csv(rows)


def findings_markdown(findings: FindingsRecord) -> str:
    """Return the paragraphs and the tables of findings as Markdown."""
    parts = [escape(paragraph) for paragraph in findings.paragraphs]
    for record in findings.tables:
        rows = [[_rounded(value) for value in row] for row in record.rows]
        parts.append(f"**{escape(record.title)}**\n\n{_markdown(record.columns, rows)}".rstrip())
    return "\n\n".join(parts) + "\n"


def findings_latex(findings: FindingsRecord) -> str:
    """Return the tables of findings as LaTeX tables (booktabs)."""
    tables = [
        _latex(record.title, record.columns, [[_rounded(v) for v in row] for row in record.rows])
        for record in findings.tables
    ]
    return "\n".join(["% needs \\usepackage{booktabs}", *tables])


def _answer(analysis: Analysis) -> tuple[list[str], list[list[Any]]]:
    metric, gap = analysis.metric, gap_of(analysis)
    unit = unit_of(metric)
    header = ["arm", *_headings(metric.label, unit)]
    header += [f"gap, train {MINUS} test ({unit_of(gap).difference})"] if gap else []
    measured = measured_costs(analysis)
    header += [*(COSTS[name][0] for name in measured), "runs"]
    rows = []
    for arm in analysis.arms:
        cells = [_code(arm.label), *_figures(arm, metric.name, unit)]
        cells += [unit_of(gap).number(arm.metrics[gap.name].mean, signed=True)] if gap else []
        cells += [COSTS[name][2](arm.costs.get(name)) for name in measured]
        counts, steps = run_counts(arm.runs)
        cells = ["diverged" if cell is None and arm.all_diverged else cell for cell in cells]
        rows.append([*cells, "; ".join([counts, *steps])])
    return header, rows


def _headings(label: str, unit: Unit) -> list[str]:
    name, difference = (f" ({one})" if one else "" for one in (unit.name, unit.difference))
    return [f"{label}{name} [95 %]", f"paired difference{difference} [95 %]", "corrected p", "verdict"]


def _figures(arm: ArmAnalysis, outcome: str, unit: Unit) -> list[str | None]:
    mean = arm.metrics[outcome]
    number = _with_interval(unit.number(mean.mean), unit.interval(mean.low, mean.high))
    return [number, *_difference(arm.differences.get(outcome), unit)]


def _difference(entry: Difference | None, unit: Unit) -> list[str | None]:
    if entry is None:
        return ["–", "–", "–"]
    number = _with_interval(unit.number(entry.mean, signed=True), unit.interval(entry.low, entry.high, signed=True))
    return [number, p_value(entry.p_corrected), entry.verdict_text]


def _with_interval(number: str | None, interval: str) -> str | None:
    return f"{number} {interval}".strip() if number is not None else None


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as the text of a CSV file, in which no text is a formula of a spreadsheet."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(list(map(as_cell, row)) for row in rows)
    return text.getvalue()


def _markdown(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(_cell(value) for value in row) + " |\n" for row in cells)


def _cell(value: Any) -> str:
    text = "missing" if value is None else str(value)
    # a bar ends a column even inside code
    return text.replace("|", "\\|") if text.startswith("`") else escape(text)


def _code(label: str) -> str:
    return "`" + label.replace("`", "'").replace("\n", " ") + "`"


def escape(text: str) -> str:
    """Return text with the special characters of Markdown and HTML escaped."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    return "".join(f"\\{character}" if character in "|*`" else character for character in text)


def _latex(title: str, header: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    lines = [" & ".join(tex(value) for value in row) + r" \\" for row in [header, *rows]]
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    columns = "l" + "r" * (len(header) - 1)
    return (
        "\\begin{table}\n\\centering\n"
        f"\\caption{{{tex(f'{title}. {caption}' if caption else title)}}}\n"
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


TEX = {character: f"\\{character}" for character in "&%$#_{}"}
TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
TEX |= {">": r"\textgreater{}", "|": r"\textbar{}", MINUS: "$-$", "±": r"$\pm$", "×": r"$\times$", "–": "--"}
TEX |= {"\u00a0": "~", "σ": r"$\sigma$", "λ": r"$\lambda$", "→": r"$\to$", "\n": " "}


def tex(value: Any) -> str:
    """Return a value as LaTeX with special characters escaped; text in backticks becomes code."""
    text = "missing" if value is None else str(value)
    if text.startswith("`"):
        return f"\\texttt{{{tex(text.strip('`'))}}}"
    return "".join(TEX.get(character, character) for character in text)
