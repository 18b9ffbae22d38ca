"""Judging: which heads of a checkpoint are worst, and how far a figure lies from those of other heads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from headwise.auditing.records import AuditAlert, AuditRecord, WorstHead
from headwise.auditing.weights import PRODUCTS, in_words
from headwise.statistics import STATISTICS
from headwise.statistics.weights import WEIGHT_STATISTICS

# The least spread between heads that counts, as a share.
LEAST = 0.05
# What one figure, and an alert, can add to a head's score: one broken figure must not hide all others.
MOST = 10.0


def worst_heads(records: Sequence[AuditRecord], alerts: Sequence[AuditAlert], most: int = 5) -> list[WorstHead]:
    """Rank heads by how far their figures lie out on the worrying side, alerts first.

    A figure counts by its distance from the median of all heads, in robust standard deviations (1.4826 MAD) of its logarithm
    where it is positive, at least 5 %; beyond 2 of them the excess is added up, 10
    at most for each figure, and an alert adds 10.

    Returns:
        The worst heads, the worst first.
    """
    scores: dict[tuple[str, int], dict[str, float]] = {}
    depths = {record["site"]: record["depth"] for record in records}
    for name, direction in worrying().items():
        heads = [
            ((r["site"], r["head"]), r["value"]) for r in records if r["statistic"] == name and r["head"] is not None
        ]
        middle, away = distances([value for _, value in heads])
        for (head, value), distance in zip(heads, away, strict=True):
            excess = (distance if direction == "high" else -distance) - 2
            words = f"{in_words(name)} {value:.3g} (median {middle:.3g})"
            scores.setdefault(head, {})[words] = min(max(0.0, excess), MOST)
    for alert in alerts:
        if alert["head"] is not None:
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
    """Give the figures that have a worrying side, and which one: "high" or "low"."""
    weights = {f"{n}_{kind}": s.worse for kind in PRODUCTS for n, s in WEIGHT_STATISTICS.items() if s.worse}
    return {**weights, **{name: s.worse for name, s in STATISTICS.items() if s.worse}}


def distances(values: list[float]) -> tuple[float, list[float]]:
    """Give the median, and how many robust standard deviations each value lies from it: 0 where there are too few for a spread."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 3:
        return statistics.median(finite) if finite else math.nan, [0.0] * len(values)
    logarithmic = min(finite) > 0
    scaled = [math.log(v) if logarithmic and math.isfinite(v) else v for v in values]
    known = [v for v in scaled if math.isfinite(v)]
    middle = statistics.median(known)
    away = [abs(v - middle) for v in known]
    # Where all heads are alike to a few per cent, what is left between them tells nothing.
    least = LEAST if logarithmic else LEAST * max(abs(v) for v in known)
    # 1.4826 and 1.2533 make the median and the mean of |x| standard deviations of a normal distribution; the mean counts where
    # half of the heads are alike, and the median of their distances is zero.
    spread = max(
        1.4826 * statistics.median(away), 1.2533 * statistics.fmean(away) if not logarithmic else 0.0, least, 1e-12
    )
    return statistics.median(finite), [(v - middle) / spread if math.isfinite(v) else 0.0 for v in scaled]
