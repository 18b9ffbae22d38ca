"""The tables and sentences of an audit, and all of it as Markdown."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from typing_extensions import TypedDict

from headwise.health.auditing.alert_texts import count, harmless, kinds, places, reason_of, serious, short_place
from headwise.health.auditing.records import AuditRecord, place_of
from headwise.health.auditing.result import SCORE, AuditResult, distances, worrying
from headwise.health.auditing.weights import PRODUCTS, compared, in_words
from headwise.health.statistics import STATISTICS
from headwise.health.statistics.weights import WEIGHT_STATISTICS


def files_of(out: str | Path) -> tuple[Path, Path]:
    """Return the paths of a report and its JSON, as `--out` names them."""
    page = Path(out)
    page = page if page.suffix in (".html", ".md") else page.with_name(page.name + ".html")
    return page, page.with_suffix(".json")


class Range(TypedDict):
    """A statistic's smallest, median and largest value over all heads, and the places of the extremes."""

    statistic: str
    lowest: float
    at: str
    median: float
    highest: float
    where: str


class Extreme(TypedDict):
    """A statistic's most worrying value, its place, the median, and the distance between the two."""

    statistic: str
    worst: float
    at: str
    median: float
    away: float


def title_of(statistic: str) -> str:
    """Return a statistic's name in words, its product and its unit."""
    name, _, kind = statistic.rpartition("_")
    found = WEIGHT_STATISTICS[name] if kind in PRODUCTS else STATISTICS.get(statistic)
    return in_words(statistic) + (f" ({found.unit})" if found and found.unit else "")


def overview(audit: AuditResult) -> list[Range]:
    """Return each statistic's smallest, median and largest value and the places of the extremes."""
    rows: list[Range] = []
    for name in dict.fromkeys(record["statistic"] for record in audit.records):
        records = [r for r in audit.records if r["statistic"] == name and math.isfinite(r["value"])]
        if not records:
            continue
        low, high = min(records, key=lambda r: r["value"]), max(records, key=lambda r: r["value"])
        rows.append(
            {
                "statistic": title_of(name),
                "lowest": low["value"],
                "at": short(low, audit),
                "median": statistics.median(r["value"] for r in records),
                "highest": high["value"],
                "where": short(high, audit),
            }
        )
    return rows


def most_worrying(audit: AuditResult) -> list[Extreme]:
    """Return the worst value, its place and the median of each statistic with a worrying side, the farthest first."""
    rows: list[Extreme] = []
    for name, side in worrying().items():
        records = [r for r in audit.records if r["statistic"] == name and math.isfinite(r["value"])]
        if not records:
            continue
        middle, away = distances([r["value"] for r in records])
        sign = 1 if side == "high" else -1
        distance, worst = max((sign * value, index) for index, value in enumerate(away))
        rows.append(
            {
                "statistic": in_words(name),
                "worst": records[worst]["value"],
                "at": short(records[worst], audit),
                "median": middle,
                "away": distance,
            }
        )
    return sorted(rows, key=lambda row: -row["away"])


def short(record: AuditRecord, audit: AuditResult) -> str:
    """Return a short name of a record's place, by depth if depths are unique: "layer 3 head 1"."""
    depths = [layer["depth"] for layer in audit.layers]
    if len(set(depths)) < len(depths):
        return place_of(record)
    return place_of(record, f"layer {record['depth']}")


def lead(audit: AuditResult) -> str:
    """Return a sentence that sums up the alerts of a checkpoint that ask for an action."""
    heads = sum(layer.get("heads") or 0 for layer in audit.layers)
    found = serious(audit.alerts)
    alerted = {(a["site"], a["head"]) for a in found if a["head"] is not None}
    of = f"{count(heads, 'head')} in {count(len(audit.layers), 'layer')}"
    if not found:
        return f"No statistic of {of} {'calls for action' if harmless(audit.alerts) else 'is beyond its limit'}."
    if not alerted:
        return f"{count(len(found), 'alert')} on whole layers, none on a head, of {of}."
    return f"{count(len(found), 'alert')} on {len(alerted)} of {of}."


def markdown(audit: AuditResult) -> str:
    """Return the audit as a short Markdown page: alerts, worst heads, overview, notes, and how it was made."""
    lines = [f"# Audit of {audit.checkpoint}", "", lead(audit)]
    if found := serious(audit.alerts):
        lines += ["", "## Alerts", ""]
        lines += [f"- **{one.name}** {' '.join(one.sentences)}" for one in places(audit, found)]
        lines += ["", "### What to do", ""]
        lines += [f"- **{kind.title}** ({kind.alerts}): {kind.remedy} Source: {kind.source}." for kind in kinds(found)]
    if worst := [w for w in audit.worst() if w["reasons"]]:
        lines += ["", "## Worst heads", ""]
        rows = [[short_place(w, audit), f"{w['score']:g}", reason_of(w)] for w in worst]
        lines += [*_table(["head", "score", "why"], rows), "", f"Score: {SCORE}"]
    if quiet := harmless(audit.alerts):
        lines += ["", f"## No action needed: {count(len(quiet), 'head')}", "", kinds(quiet)[0].remedy, ""]
        lines += [f"- **{one.name}** {' '.join(one.sentences)}" for one in places(audit, quiet)]
    lines += ["", "## Statistics", ""]
    rows = [
        [o["statistic"], f"{o['lowest']:.4g}", o["at"], f"{o['median']:.4g}", f"{o['highest']:.4g}", o["where"]]
        for o in overview(audit)
    ]
    lines += _table(["statistic", "lowest", "at", "median", "highest", "at"], rows)
    if audit.balances:
        lines += ["", "## Balance of the factors", ""]
        lines += _table(
            ["product", "what is compared", "pairs", "mean difference", "correlation", "verdict"], balance_rows(audit)
        )
    if audit.notes():
        lines += ["", "## What to know", "", *(f"- {note}" for note in audit.notes())]
    versions = ", ".join(f"{name} {number}" for name, number in audit.versions.items())
    machine = f"{audit.hardware.get('processor')}, {audit.hardware.get('cores')} cores"
    lines += ["", "## How it was made", "", f"- `{audit.command}`" if audit.command else "- headwise.audit"]
    lines += [
        f"- {audit.kind}, {audit.model}; data: {audit.data or 'none, weights alone'}; {audit.seconds:.1f} s",
        f"- {versions}",
        f"- {machine}",
        "",
    ]
    return "\n".join(lines)


def balance_rows(audit: AuditResult) -> list[list[str]]:
    """Return the rows of the balance table: product, comparison, pairs, mean difference, correlation, verdict."""
    return [
        [
            PRODUCTS[entry["product"]],
            f"{entry['first']} against {entry['second']}",
            f"{len(entry['pairs']):,}",
            f"{entry['deviation']:.1%}" if math.isfinite(entry["deviation"]) else "–",
            f"{entry['correlation']:.3f}" if math.isfinite(entry["correlation"]) else "–",
            entry["verdict"],
        ]
        for entry in compared(audit.balances)
    ]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
