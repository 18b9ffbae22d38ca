"""The report of an audit: one HTML page, one table of statistics, and Markdown."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from headwise.auditing.alert_texts import count, harmless, kinds, places, serious, short_place, without_place
from headwise.auditing.records import AuditRecord, place_of
from headwise.auditing.result import SCORE, AuditResult, distances, worrying
from headwise.auditing.weights import NEARLY, PRODUCTS, compared, in_words
from headwise.files.durable import write_bytes
from headwise.files.ownership import claim
from headwise.pages.charts import beyond, heat_map, pairs_of, robust_range
from headwise.pages.shell import (
    Column,
    Section,
    figure,
    findings,
    fold,
    grid,
    join,
    page,
    pairs,
    prose,
    subtitle,
    table,
)
from headwise.statistics import STATISTICS
from headwise.statistics.weights import WEIGHT_STATISTICS

# Heads and layers whose alerts are shown at once; the others are folded.
OPEN = 12
# The most points of a chart; of more points, an evenly spaced selection is drawn.
POINTS = 1500
BALANCE = (
    "Weight decay makes both factors of a product balance, and with it the norms below equal (Kobayashi et al. 2024, "
    f"arXiv 2410.23819); a mean difference up to {NEARLY:.0%} of the mean counts as nearly identical. Rotary pairs and "
    "heads that share keys and values count together."
)
# Statistics whose maps carry the singular values of each head.
TRACED = ("spectral_norm", "effective_rank", "pseudo_rank")


def audit_page(audit: AuditResult) -> str:
    """Return the whole page as one HTML string."""
    names = list(dict.fromkeys(record["statistic"] for record in audit.records))
    weights = [name for name in names if name not in STATISTICS]
    on_data = [name for name in names if name in STATISTICS]
    sections = [Section("Alerts", _alerts(audit))]
    worst = _worst(audit)
    if worst:
        sections.append(Section("Worst heads", join(worst, fold("How the score is made", prose([SCORE])))))
    for kind, product in PRODUCTS.items():
        maps = [_map(audit, name) for name in weights if name.endswith(f"_{kind}")]
        if maps:
            sections.append(Section(f"Weights: {product}", grid(maps, wide=True)))
    if audit.balances:
        sections.append(Section("Balance of the factors", _balances(audit), BALANCE))
    if on_data:
        sections.append(
            Section("Activations", grid([_map(audit, name) for name in on_data], wide=True), f"Read on {audit.data}.")
        )
    sections.append(Section("All statistics", _overview(audit)))
    sections.append(Section("What to know", _notes(audit)))
    sections.append(Section("How it was made", pairs(_provenance(audit)), collapsed=True))
    heads = sum(layer.get("heads") or 0 for layer in audit.layers)
    facts = [
        ("layers", len(audit.layers)),
        ("heads", heads),
        ("alerts", len(serious(audit.alerts))),
        ("read", audit.data or "weights alone"),
    ]
    return page(f"Audit of {audit.checkpoint}", sections, eyebrow="headwise audit", lead=lead(audit), facts=facts)


def _worst(audit: AuditResult) -> Any:
    columns = [Column("head"), Column("score", number=True), Column("why", wide=True)]
    rows = [
        [short_place(w, audit), w["score"], "; ".join(without_place(one, w) for one in w["reasons"])]
        for w in audit.worst(10)
        if w["reasons"]
    ]
    return table(columns, rows) if rows else ""


def _alerts(audit: AuditResult) -> Any:
    found, quiet = serious(audit.alerts), harmless(audit.alerts)
    parts = [] if found else [prose(["No statistic is beyond its limit."])]
    listed = places(audit, found)
    parts += [findings((one.name, one.sentences) for one in listed[:OPEN])]
    if len(listed) > OPEN:
        rest = findings((one.name, one.sentences) for one in listed[OPEN:])
        parts.append(fold(f"{len(listed) - OPEN} more heads and layers", rest))
    if found:
        remedies = [(f"{kind.title} ({kind.alerts})", [kind.remedy], kind.source) for kind in kinds(found)]
        parts += [subtitle("What to do"), findings(remedies)]
    if quiet:
        why = kinds(quiet)[0]
        listed_quiet = findings((one.name, one.sentences) for one in places(audit, quiet))
        title = f"{count(len(quiet), 'head')} to know of, without a need for action"
        parts.append(fold(title, join(prose([f"{why.remedy} Source: {why.source}."], kind="note"), listed_quiet)))
    return join(*parts)


def _map(audit: AuditResult, name: str) -> Any:
    records = [record for record in audit.records if record["statistic"] == name]
    statistic, _, kind = name.rpartition("_")
    traced = statistic in TRACED and kind in PRODUCTS
    depths = [layer["depth"] for layer in audit.layers]
    by_depth = len(set(depths)) == len(depths)
    rows = []
    for record in records:
        value = record["value"]
        row: dict[str, Any] = {"layer": record["depth"] if by_depth else record["site"], "head": _column(record)}
        row["value"] = float(f"{value:.4g}") if math.isfinite(value) else None
        if traced and record["head"] is not None:
            spectrum = audit.spectra.get(f"{record['site']}|{record['head']}|{kind}", [])
            row["spectrum"] = [float(f"{x:.3g}") for x in spectrum]
        rows.append(row)
    values = [row["value"] for row in rows if row["value"] is not None]
    domain = robust_range(values)
    chart = heat_map(rows, value_title=title_of(name), legend_title="", domain=domain)
    caption = f"{_caption(statistic if kind in PRODUCTS else name)} {beyond(values, domain)}".strip()
    return figure(chart, title=title_of(name), caption=caption, trace="singular values" if traced else "")


def _column(record: AuditRecord) -> str | int:
    if "group" in record:
        return f"group {record['group']}"
    return "layer" if record["head"] is None else record["head"]


def _caption(name: str) -> str:
    cls = WEIGHT_STATISTICS.get(name) or STATISTICS.get(name)
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split()) if cls else ""


def _balances(audit: AuditResult) -> Any:
    comparisons = compared(audit.balances)
    columns = [Column("product"), Column("what is compared", wide=True), Column("pairs", number=True)]
    columns += [Column("mean difference", number=True), Column("correlation", number=True), Column("verdict")]
    charts = []
    for entry in comparisons:
        step = -(-len(entry["pairs"]) // POINTS)
        points = [{entry["first"]: x, entry["second"]: y} for x, y in entry["pairs"][:: max(step, 1)]]
        title = f"{entry['first']} against {entry['second']}, {PRODUCTS[entry['product']]}"
        charts.append(figure(pairs_of(points, x=entry["first"], y=entry["second"]), title=title, name=title))
    return join(table(columns, balance_rows(audit)), grid(charts, wide=True))


def _overview(audit: AuditResult) -> Any:
    columns = [
        Column("statistic"),
        *(Column(n, number=n != "at") for n in ("lowest", "at", "median", "highest")),
        Column("where"),
    ]
    return table(
        columns,
        [[o[key] for key in ("statistic", "lowest", "at", "median", "highest", "where")] for o in overview(audit)],
    )


def _notes(audit: AuditResult) -> Any:
    reasons: dict[str, list[str]] = {}
    for layer in audit.layers:
        for name, why in {**layer["reasons"], **audit.reasons.get(layer["site"], {})}.items():
            reasons.setdefault(why, []).append(name)
    lines = [f"{', '.join(dict.fromkeys(names))}: {why}." for why, names in reasons.items()]
    layouts = ", ".join(dict.fromkeys(str(layer["layout"]) for layer in audit.layers if layer["layout"]))
    return join(
        prose([*audit.notes(), *(["Statistics that do not apply are left out. " + " ".join(lines)] if lines else [])]),
        prose([f"Layout of the projections: {layouts}."]),
    )


def _provenance(audit: AuditResult) -> list[tuple[str, str]]:
    facts = [
        ("checkpoint", f"{audit.checkpoint} ({audit.kind}, {audit.model})"),
        ("command", audit.command or "headwise.audit"),
    ]
    facts += [("seconds", f"{audit.seconds:.1f}"), ("commit", audit.commit or "not known")]
    return [*facts, ("versions", json.dumps(audit.versions)), ("hardware", json.dumps(audit.hardware))]


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit(AuditResult):
    """The health of a checkpoint's heads, which can be written as a report."""

    def write(self, out: str | Path) -> tuple[Path, Path]:
        """Write the report (Markdown if `out` ends in .md, else HTML) and the JSON next to it; return both paths.

        Raises:
            StudyError: if one of the files exists and was not written by headwise.
        """
        page, json_file = files_of(out)
        claim(page.parent, (page.name, json_file.name), shared=True)
        write_bytes(page, (markdown(self) if page.suffix == ".md" else audit_page(self)).encode())
        write_bytes(json_file, self.to_json().encode())
        return page, json_file


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
        return f"No statistic of {of} is beyond its limit."
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
        rows = [
            [short_place(w, audit), f"{w['score']:g}", "; ".join(without_place(one, w) for one in w["reasons"])]
            for w in worst
        ]
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
