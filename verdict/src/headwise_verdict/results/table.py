"""The terminal output of a study: its answer as a table of at most 80 columns and in words."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from headwise_verdict.pages.formats import Unit, milliseconds, p_value, unit_named
from headwise_verdict.results.analysis_record import KINDS_IN_WORDS, Analysis, ArmAnalysis, FindingsRecord, JudgedClaim
from headwise_verdict.results.stored import checked_analysis, checked_findings

WIDTH = 80
SHORTEST = 14  # the smallest width of the column of arm names


def print_answer(folder: Path) -> None:
    """Print the result in a folder: the table of a study, or the first paragraph of findings."""
    if (folder / "study.json").is_file():
        print_table(checked_analysis(folder / "analysis.json"))
    else:
        print_findings(checked_findings(folder / "findings.json"))


def print_table(analysis: Analysis) -> None:
    """Print one row per arm and the answer in words, in lines of at most 80 columns."""
    unit = unit_named(analysis.metric.unit)
    label = f"{analysis.metric.label}{f' ({unit.name})' if unit.name else ''}"
    header = ["arm", label, f"difference{f' ({unit.difference})' if unit.difference else ''}", "p", "verdict"]
    rows = [_row(arm, analysis, unit) for arm in analysis.arms]
    print()
    for line in _lines(header, rows):
        print(line)
    print()
    print_sentences([analysis.answer, *analysis.warnings, *_costs(analysis)])
    print_claims(analysis.claims)


def print_findings(findings: FindingsRecord) -> None:
    """Print the first paragraph of findings, which answers the question, and the claims."""
    print()
    print_sentences(findings.paragraphs[:1])
    print_claims(findings.claims)


def print_claims(claims: list[JudgedClaim]) -> None:
    """Print one line per claim: the verdict and as much of the claim as fits."""
    for claim in claims:
        kind = f" ({KINDS_IN_WORDS[claim.kind]})" if claim.kind in KINDS_IN_WORDS else ""
        print(textwrap.shorten(f"claim, {claim.verdict_words}{kind}: {claim.text}", WIDTH, placeholder=" …"))


def print_sentences(sentences: list[str]) -> None:
    """Print paragraphs, wrapped to 80 columns."""
    for sentence in sentences:
        print(textwrap.fill(sentence.replace("\u00a0", " "), WIDTH, break_on_hyphens=False))


def _row(arm: ArmAnalysis, analysis: Analysis, unit: Unit) -> list[str]:
    mean, entry = arm.metrics[analysis.primary], arm.differences.get(analysis.primary)
    # an arm without a figure has no finished run: all diverged, or none has ended
    absent = "diverged" if arm.all_diverged else "none"
    label = f"{arm.label} ({len(arm.runs.diverged)} diverged)" if arm.runs.diverged else arm.label
    middle = unit.number(mean.mean) or absent
    if entry is None:
        return [label, middle, "", "", ""]
    interval = unit.interval(entry.low, entry.high, signed=True)
    difference = f"{unit.number(entry.mean, signed=True) or absent} {interval}".strip()
    return [label, middle, difference, p_value(entry.p_corrected) or "", entry.verdict]


def _lines(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of the table; names and headings that are too wide are wrapped."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    widths = [max(width, *map(len, title.split(" "))) for width, title in zip(widths, header)]
    rest = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = max(SHORTEST, min(widths[0], WIDTH - rest))
    lines = _folded([header], widths)
    return [*lines, *_folded(rows, widths)]


def _folded(rows: list[list[str]], widths: list[int]) -> list[str]:
    lines = []
    for row in rows:
        cells = [_wrapped(cell, width, "" if n else "  ") for n, (cell, width) in enumerate(zip(row, widths))]
        for at in range(max(map(len, cells))):
            parts = [cell[at] if at < len(cell) else "" for cell in cells]
            texts = [
                part.ljust(width) if n in (0, 4) else part.rjust(width)
                for n, (part, width) in enumerate(zip(parts, widths))
            ]
            lines.append("  ".join(texts).rstrip())
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    if len(text) <= width:
        return [text]
    # a name is wrapped after a bracket, comma or space before it is cut; a unit such as "(%)" is not divided
    spaced = re.sub(r"(?<! )\(", "(\u200b", text).replace(",", ",\u200b")
    lines, line = [], ""
    for part in spaced.replace(" ", " \u200b").split("\u200b"):
        if line and len((line + part).rstrip()) > width:
            lines.append(line.rstrip())
            line = indent
        line += part
        while len(line.rstrip()) > width:
            # a number is not divided
            cut = line.rfind("=", 0, width) + 1 or width
            lines.append(line[:cut])
            line = indent + line[cut:]
    return [*lines, line.rstrip()]


def _costs(analysis: Analysis) -> list[str]:
    times = [(time, arm.label) for arm in analysis.arms if (time := arm.costs.get("seconds_per_step")) is not None]
    if not times:
        return []
    (least, first), (most, last) = min(times), max(times)
    start = "Indicative, as other runs shared the processor: a" if analysis.cost_is_indicative else "A"
    if first == last or least == most:
        return [f"{start} step takes {milliseconds(least)}."]
    return [f"{start} step takes {milliseconds(least)} ({first}) to {milliseconds(most)} ({last})."]
