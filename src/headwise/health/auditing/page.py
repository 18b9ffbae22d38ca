"""The report of an audit as one HTML page."""

from __future__ import annotations

import json
import math
from typing import Any

from headwise.health.auditing.alert_texts import (
    capital,
    count,
    harmless,
    kinds,
    places,
    reason_of,
    serious,
    short_place,
)
from headwise.health.auditing.records import AuditRecord
from headwise.health.auditing.result import SCORE, AuditResult
from headwise.health.auditing.summary import balance_rows, lead, overview, title_of
from headwise.health.auditing.weights import NEARLY, PRODUCTS, compared
from headwise.health.statistics import STATISTICS
from headwise.health.statistics.weights import WEIGHT_STATISTICS
from headwise_verdict.pages import (
    Column,
    Section,
    figure,
    findings,
    fold,
    grid,
    join,
    page,
    pairs,
    pairs_of,
    prose,
    robust_heat_map,
    subtitle,
    table,
)

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
    rows = [[short_place(head, audit), head["score"], reason_of(head)] for head in audit.worst(10) if head["reasons"]]
    return table(columns, rows) if rows else ""


def _alerts(audit: AuditResult) -> Any:
    found, quiet = serious(audit.alerts), harmless(audit.alerts)
    parts = [] if found else [prose([f"No statistic {'calls for action' if quiet else 'is beyond its limit'}."])]
    listed = places(audit, found)
    parts += [findings((one.name, one.sentences) for one in listed[:OPEN])]
    if len(listed) > OPEN:
        rest = findings((one.name, one.sentences) for one in listed[OPEN:])
        parts.append(fold(f"{len(listed) - OPEN} more heads and layers", rest))
    if found:
        remedies = [(f"{kind.title} ({kind.alerts})", [kind.remedy], kind.source) for kind in kinds(found)]
        parts += [subtitle("What to do"), findings(remedies)]
    if quiet:
        kind = kinds(quiet)[0]
        listed_quiet = findings((one.name, one.sentences) for one in places(audit, quiet))
        title = f"{count(len(quiet), 'head')} to know of; no action needed"
        parts.append(fold(title, join(prose([f"{kind.remedy} Source: {kind.source}."], kind="note"), listed_quiet)))
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
    chart, beyond = robust_heat_map(rows, value_title=title_of(name))
    caption = f"{_caption(statistic if kind in PRODUCTS else name)} {beyond}".strip()
    return figure(chart, title=capital(title_of(name)), caption=caption, trace="singular values" if traced else "")


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
        title = capital(f"{entry['first']} against {entry['second']}, {PRODUCTS[entry['product']]}")
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
