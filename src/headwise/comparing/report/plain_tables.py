"""Write the answer table for other programs and for pasting: CSV with raw numbers, Markdown with rounded ones."""

from __future__ import annotations

import csv
import io

from headwise.comparing.report.study_page import all_diverged, gap_name
from headwise.pages.formats import MINUS, mebibytes, milliseconds, p_value, unit_of


def study_csv(analysis: dict) -> str:
    """Return one row a method, unrounded: accuracies in [0, 1], losses in nats, seconds, bytes; empty where a figure is missing."""
    name, gap = analysis["metric"]["name"], gap_name(analysis)
    header = [
        "method",
        name,
        "low",
        "high",
        "difference",
        "difference_low",
        "difference_high",
        "pairs",
        "p",
        "p_corrected",
        "verdict",
    ]
    header += [gap or "gap", "seconds_per_step", "peak_memory_bytes", "finished", "diverged", "missing"]
    rows = [header]
    for method in analysis["methods"]:
        mean, difference = method["metrics"][name], method["differences"].get(name, {})
        row = [method["label"], mean["mean"], mean["low"], mean["high"]]
        row += [difference.get(key) for key in ("mean", "low", "high", "n", "p", "p_corrected", "verdict_text")]
        row += [method["metrics"][gap]["mean"] if gap else None]
        row += [method["costs"]["seconds_per_step"], method["costs"]["peak_memory_bytes"]]
        row += [method["runs"]["finished"], len(method["runs"]["diverged"]), len(method["runs"]["missing"])]
        rows.append(row)
    return _csv(rows)


def study_markdown(analysis: dict) -> str:
    """Return the answer sentence and the table as Markdown."""
    metric, gap = analysis["metric"], gap_name(analysis)
    unit = unit_of(metric["name"], metric)
    gap_title = f"gap, train {MINUS} test" + (f" ({unit_of(gap, metric).difference})" if gap else "")
    header = [
        "method",
        f"{metric['label']} ({unit.name}) [95 %]",
        f"paired difference ({unit.difference}) [95 %]",
        "corrected p",
    ]
    header += ["verdict", gap_title, "time per step", "memory", "runs"]
    rows = []
    for method in analysis["methods"]:
        mean, difference = method["metrics"][metric["name"]], method["differences"].get(metric["name"])
        cells = [
            _code(method["label"]),
            _with_interval(unit.number(mean["mean"]), unit.interval(mean["low"], mean["high"])),
            *_difference(difference, unit),
            unit_of(gap, metric).number(method["metrics"][gap]["mean"], signed=True) if gap else None,
            milliseconds(method["costs"]["seconds_per_step"]),
            mebibytes(method["costs"]["peak_memory_bytes"]),
            _state(method["runs"]),
        ]
        rows.append(["diverged" if cell is None and all_diverged(method) else cell for cell in cells])
    return f"{escape(analysis['answer'])}\n\n{_markdown(header, rows)}"


def _difference(entry: dict | None, unit) -> list:
    if entry is None:
        return ["–", "–", "–"]
    number = _with_interval(
        unit.number(entry["mean"], signed=True), unit.interval(entry["low"], entry["high"], signed=True)
    )
    return [number, p_value(entry["p_corrected"]), entry["verdict_text"]]


def _with_interval(number: str | None, interval: str) -> str | None:
    return f"{number} {interval}".strip() if number is not None else None


def _state(runs: dict) -> str:
    parts = [f"{runs['finished']} of {runs['asked']}"]
    parts += [
        f"seed {run['seed']} diverged at step {run['step'] if run['step'] is not None else '?'}"
        for run in runs["diverged"]
    ]
    return "; ".join(parts + ([f"{len(runs['missing'])} missing"] if runs["missing"] else []))


def findings_csv(findings: dict) -> str:
    """Return the tables of findings below each other, each under a line with its title."""
    rows = []
    for found in findings.get("tables", []):
        rows += [*([[]] if rows else []), [found["title"]], found["columns"], *found["rows"]]
    return _csv(rows)


def findings_markdown(findings: dict) -> str:
    """Return the paragraphs and the tables of findings as Markdown."""
    parts = [escape(paragraph) for paragraph in findings.get("paragraphs", [])]
    for found in findings.get("tables", []):
        rows = [[_rounded(value) for value in row] for row in found["rows"]]
        parts.append(f"**{escape(found['title'])}**\n\n{_markdown(found['columns'], rows)}".rstrip())
    return "\n\n".join(parts) + "\n"


def _rounded(value):
    return f"{value:.4g}" if isinstance(value, float) else value


def _csv(rows) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _markdown(header, rows) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(_cell(value) for value in row) + " |\n" for row in cells)


def _cell(value) -> str:
    text = "missing" if value is None else str(value)
    return text if text.startswith("`") else escape(text)


def _code(label: str) -> str:
    return "`" + label.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def escape(text: str) -> str:
    """Return text in which Markdown and HTML find nothing to act on."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    return "".join(f"\\{character}" if character in "|*`" else character for character in text)
