"""The result of an audit, and the score by which its heads are ranked."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headwise.health.auditing.records import (
    AuditAlert,
    AuditRecord,
    BalanceRecord,
    FiguresOfStatistic,
    Layer,
    WorstHead,
)
from headwise.health.auditing.weights import PRODUCTS, in_words
from headwise.health.statistics import STATISTICS
from headwise.health.statistics.alert_remedies import HARMLESS
from headwise.health.statistics.weights import WEIGHT_STATISTICS

# The name of the JSON, increased when a field changes its meaning or goes; see `AuditContent`.
SCHEMA = "headwise.audit/1"
# The smallest relative spread between heads.
LEAST = 0.05
# The most that a figure or an alert adds to a head's score: one broken figure must not hide all others.
MOST = 10.0
# The explanation of the score for reports.
SCORE = (
    f"{MOST:g} per alert, plus each statistic's excess over two robust standard deviations (at most {MOST:g}). "
    "Deviations are measured from the median of all heads towards unhealthy values, in units of 1.4826 MAD (of the "
    "logarithms, if all values are positive). Alerts that need no action add nothing."
)


def worst_heads(records: Sequence[AuditRecord], alerts: Sequence[AuditAlert], most: int = 5) -> list[WorstHead]:
    """Return the heads whose figures are farthest on the unhealthy side, the worst first.

    The distance of a figure from the median of all heads is measured in robust standard deviations (1.4826 MAD, at
    least 5 %), of the logarithm if all values are positive. The excess over 2 is added to the head's score, at most 10
    for each figure, and an alert adds 10 unless it needs no action.
    """
    scores: dict[tuple[str, int], dict[str, float]] = {}
    depths = {record["site"]: record["depth"] for record in records}
    for name, direction in worrying().items():
        heads = [
            ((r["site"], r["head"]), r["value"]) for r in records if r["statistic"] == name and r["head"] is not None
        ]
        middle, deviations = distances([value for _, value in heads])
        for (head, value), distance in zip(heads, deviations, strict=True):
            excess = (distance if direction == "high" else -distance) - 2
            reason = f"{in_words(name)} {value:.3g} (median {middle:.3g})"
            scores.setdefault(head, {})[reason] = min(max(0.0, excess), MOST)
    for alert in alerts:
        if alert["head"] is not None and alert["alert"] not in HARMLESS:
            scores.setdefault((alert["site"], alert["head"]), {})[alert["sentence"]] = MOST
    ranked = sorted(scores.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    return [
        {
            "site": site,
            "depth": depths.get(site),
            "head": head,
            "score": round(sum(parts.values()), 2),
            "reasons": [w for w, part in sorted(parts.items(), key=lambda p: -p[1]) if part > 0][:3],
        }
        for (site, head), parts in ranked[:most]
    ]


def worrying() -> dict[str, str]:
    """Return the statistics that have a worrying side, each with that side: "high" or "low"."""
    weights = {f"{n}_{kind}": s.worse for kind in PRODUCTS for n, s in WEIGHT_STATISTICS.items() if s.worse}
    return {**weights, **{name: s.worse for name, s in STATISTICS.items() if s.worse}}


def distances(values: list[float]) -> tuple[float, list[float]]:
    """Return the median and the distance of each value from it in robust standard deviations, 0 for < 3 values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 3:
        return statistics.median(finite) if finite else math.nan, [0.0] * len(values)
    logarithmic = min(finite) > 0
    scaled = [math.log(v) if logarithmic and math.isfinite(v) else v for v in values]
    finite_scaled = [v for v in scaled if math.isfinite(v)]
    middle = statistics.median(finite_scaled)
    deviations = [abs(v - middle) for v in finite_scaled]
    # If all heads agree to a few per cent, the differences between them mean nothing.
    least = LEAST if logarithmic else LEAST * max(abs(v) for v in finite_scaled)
    # 1.4826 times the median and 1.2533 times the mean of |x| estimate a normal standard deviation. The mean is needed
    # if half of the heads are equal, because the median of the distances is 0 then.
    spread = max(
        1.4826 * statistics.median(deviations),
        1.2533 * statistics.fmean(deviations) if not logarithmic else 0.0,
        least,
        1e-12,
    )
    return statistics.median(finite), [(v - middle) / spread if math.isfinite(v) else 0.0 for v in scaled]


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The health of a checkpoint's heads.

    Attributes:
        checkpoint: its name, with its `kind` and the class of its `model`.
        records: dicts of site, depth, head (None for a layer or a group), statistic, value.
        alerts: records that passed a limit, with a sentence, a remedy and its source.
        layers: per attention layer its heads, layout, notes, and why some figures do not apply.
        spectra: singular values, "site|head|qk" or "site|head|vo" to a list, largest first.
        balances: norms that weight decay makes equal, "site|group|qk" or "site|group|vo" to those of the rows and of
            the product.
        unused: weights of attention layers in the files that the model does not use.
        remarks: what a reader must know of the files: removed prefixes, an adapter that is not read, 8-bit numbers.
        data: the names of the data for the activations; None if only weights were read.
        command, versions, commit, hardware, seconds: how the audit was made.
    """

    checkpoint: str
    kind: str
    model: str
    records: list[AuditRecord]
    alerts: list[AuditAlert]
    layers: list[Layer]
    spectra: dict[str, list[float]]
    balances: dict[str, BalanceRecord] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    data: str | None = None
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    hardware: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __repr__(self) -> str:
        heads = sum(layer.get("heads") or 0 for layer in self.layers)
        found = f"{len(self.layers)} layers, {heads} heads, {len(self.alerts)} alerts"
        return f"<{type(self).__name__} of {self.checkpoint}: {found}; write('audit.html') makes the page>"

    def worst(self, most: int = 5) -> list[WorstHead]:
        """Return the worst heads first: site, depth, head, score and the reasons in words."""
        return worst_heads(self.records, self.alerts, most)

    def notes(self) -> list[str]:
        """Return the notes on the layers, each note once with the layers that it applies to."""
        by_note: dict[str, list[str]] = {}
        for layer in self.layers:
            for note in [*layer["notes"], *dict.fromkeys(layer["missing"].values())]:
                by_note.setdefault(note.replace(f"{layer['site']} ", "a layer "), []).append(layer["site"])
        total = len(self.layers)
        lines = [
            f"the files hold {len(self.unused)} weights of attention layers that the model of this config does not "
            f"have: {_few(self.unused)}"
        ]
        return (
            self.remarks
            + (lines if self.unused else [])
            + [note if len(sites) == total else f"{note} ({_few(sites)})" for note, sites in by_note.items()]
        )

    def figures(self) -> dict[str, FiguresOfStatistic]:
        """Return the records in short form, by statistic."""
        figures: dict[str, FiguresOfStatistic] = {}
        for record in self.records:
            per = "group" if "group" in record else "layer" if record["head"] is None else "head"
            entry = figures.setdefault(record["statistic"], {"per": per, "values": {}})
            entry["values"].setdefault(record["site"], []).append(_short(record["value"], 7))
        return figures

    def to_json(self) -> str:
        """Return the result as JSON, with records in the short form of `figures` and null for non-finite numbers."""
        short = ("records", "spectra", "balances")
        content = {"schema": SCHEMA} | {name: value for name, value in asdict(self).items() if name not in short}
        content |= {"worst": self.worst(), "notes": self.notes(), "figures": self.figures()}
        content["spectra"] = {place: [_short(x, 4) for x in values] for place, values in self.spectra.items()}
        content["balances"] = {place: _shortened(record) for place, record in self.balances.items()}
        rows = [
            f" {json.dumps(key)}: {json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)}"
            for key, value in content.items()
        ]
        return "{\n" + ",\n".join(rows) + "\n}\n"


def _shortened(record: BalanceRecord) -> dict[str, Any]:
    norms = {
        name: [_short(x, 4) for x in values] for name, values in (("own", record["own"]), ("shared", record["shared"]))
    }
    return {**norms, "frobenius": _short(record["frobenius"], 7), "nuclear": _short(record["nuclear"], 7)}


def _few(sites: list[str], most: int = 3) -> str:
    return ", ".join(sites[:most]) + (f" and {len(sites) - most} more" if len(sites) > most else "")


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
