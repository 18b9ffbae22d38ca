"""Judging: which figures of the weights are worth an alert, and which heads are worst."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headwise.auditing.weights import PRODUCTS, Read
from headwise.statistics import STATISTICS
from headwise.statistics.weights import WEIGHT_STATISTICS

Record = dict[str, Any]
# The least spread between heads that counts, as a share.
LEAST = 0.05
# What one figure, and an alert, can add to a head's score.
MOST = 10.0


@dataclass(frozen=True, kw_only=True)
class WeightThresholds:
    """The limits beyond which a weight raises an alert. None switches an alert off.

    Attributes:
        stable_rank: rank collapse, where a head's product has a smaller stable rank: one direction is nearly all of it.
        dead: a dead head, where the Frobenius norm of W_OW_V is below this share of its layer's largest, or zero.
        growth: logit growth, where the spectral norm of W_KᵀW_Q is above this multiple of the model's median.
        decayed_rank: low rank by weight decay, where the pseudo-rank is smaller...
        balance: ...and the factors are balanced to this share, as decay makes them.
    """

    stable_rank: float | None = 1.2
    dead: float | None = 0.005
    growth: float | None = 10.0
    decayed_rank: float | None = 0.25
    balance: float = 0.1


class Remedy(NamedTuple):
    """What helps, and who showed it."""

    text: str
    source: str


REMEDIES = {
    "rank_collapse": Remedy(
        "less weight decay on attention (headwise.parameter_groups) keeps rank in the next run; here the head can be stored low-rank",
        "Kobayashi et al. 2024, arXiv 2410.23819",
    ),
    "dead_head": Remedy(
        "the head can be pruned, or DropHead spreads the work over heads in the next run",
        "Michel et al. 2019, arXiv 1905.10650; Zhou et al. 2020, arXiv 2004.13342",
    ),
    "logit_growth": Remedy(
        "SigmaReparam, QKNorm or QKClip bound the logits in the next run; watch the largest logit on data",
        "Zhai et al. 2023, arXiv 2303.06296; Kimi K2 2025, arXiv 2507.20534",
    ),
    "low_rank_by_decay": Remedy(
        "a smaller attention_weight_decay (headwise.parameter_groups) in the next run, where the loss asks for more rank",
        "Kobayashi et al. 2024, arXiv 2410.23819",
    ),
    "not_finite": Remedy("the file is damaged or the training diverged: take an earlier checkpoint", "IEEE 754"),
}


def weight_alerts(read: Read, limits: WeightThresholds) -> list[Record]:
    """Give an alert for every figure beyond its limit: record fields, threshold, sentence, remedy, source."""
    by_name: dict[str, list[Record]] = {}
    for record in read.records:
        by_name.setdefault(record["statistic"], []).append(record)
    found = [*_ranks(by_name, limits), *_dead(by_name, limits), *_growth(by_name, limits), *_decayed(by_name, limits)]
    for where in read.not_finite:
        record = {"site": where.rpartition(".")[0], "depth": None, "head": None, "statistic": "finite", "value": 0.0}
        found.append(("not_finite", record, 1.0, f"{where} holds NaN or infinity: its figures are left out"))
    found += _overflown(read.records)
    return [_alert(*one) for one in found]


def _overflown(records: list[Record]) -> Found:
    sites: dict[str, Record] = {}
    for record in records:
        if not math.isfinite(record["value"]):
            sites.setdefault(record["site"], record)
    for site, record in sites.items():
        text = f"the weights of {site} are too large for single precision: {in_words(record['statistic'])} is {record['value']}"
        yield "not_finite", {**record, "head": None}, math.inf, text


def _alert(name: str, record: Record, threshold: float, sentence: str) -> Record:
    kept = {key: record[key] for key in ("site", "depth", "head", "statistic", "value")}
    remedy = REMEDIES[name]
    return {
        "alert": name,
        **kept,
        "threshold": threshold,
        "sentence": sentence,
        "remedy": remedy.text,
        "source": remedy.source,
    }


def place(record: Record) -> str:
    """Name the head, group or layer of a record."""
    if record.get("group") is not None:
        return f"{record['site']} group {record['group']}"
    return record["site"] if record["head"] is None else f"{record['site']} head {record['head']}"


Found = Iterable[tuple[str, Record, float, str]]


def _ranks(records: dict[str, list[Record]], limits: WeightThresholds) -> Found:
    if (limit := limits.stable_rank) is None:
        return
    for kind, product in PRODUCTS.items():
        for record in records.get(f"stable_rank_{kind}", ()):
            if 0 < record["value"] < limit:
                text = f"{product} of {place(record)} is nearly of rank one: its stable rank is {record['value']:.3f}, below {limit:g}"
                yield "rank_collapse", record, limit, text


def _dead(records: dict[str, list[Record]], limits: WeightThresholds) -> Found:
    if (limit := limits.dead) is None:
        return
    layers: dict[str, list[Record]] = {}
    for record in records.get("frobenius_norm_vo", ()):
        layers.setdefault(record["site"], []).append(record)
    for heads in layers.values():
        # The largest: where most heads of a layer are dead, its median is that of dead heads.
        largest = max(record["value"] for record in heads)
        for record in heads:
            if record["value"] < limit * largest or record["value"] == 0:
                text = f"{place(record)} writes next to nothing: the norm of W_OW_V is {record['value']:.3g}, its layer's largest {largest:.3g}"
                yield "dead_head", record, limit * largest, text


def _growth(records: dict[str, list[Record]], limits: WeightThresholds) -> Found:
    heads = records.get("spectral_norm_qk", ())
    if (times := limits.growth) is None or not heads:
        return
    middle = statistics.median(record["value"] for record in heads)
    for record in heads:
        if record["value"] > times * middle:
            text = f"{place(record)} can make large logits: the spectral norm of W_KᵀW_Q is {record['value']:.3g}, {record['value'] / middle:.1f} times the model's median"
            yield "logit_growth", record, times * middle, text


def _decayed(records: dict[str, list[Record]], limits: WeightThresholds) -> Found:
    if (limit := limits.decayed_rank) is None:
        return
    for kind, product in PRODUCTS.items():
        balance = {
            (r["site"], r["head"]): r["value"] for r in records.get(f"imbalance_{kind}", ()) if r["head"] is not None
        }
        for record in records.get(f"pseudo_rank_{kind}", ()):
            share = balance.get((record["site"], record["head"]), math.inf)
            if record["value"] < limit and share < limits.balance:
                text = (
                    f"weight decay has made {product} of {place(record)} low-rank: 95 % of its singular values' sum lie in "
                    f"{100 * record['value']:.0f} % of the head's dimensions, and its factors are balanced to {share:.3f}"
                )
                yield "low_rank_by_decay", record, limit, text


def worst_heads(records: list[Record], alerts: list[Record], most: int = 5) -> list[Record]:
    """Rank heads by how far their figures lie out on the worrying side, alerts first.

    A figure counts by its distance from the median of all heads, in robust standard deviations (1.4826 MAD) of its logarithm
    where it is positive, at least 5 %; beyond 2 of them the excess is added up, 10
    at most for each figure, and an alert adds 10.

    Returns:
        Dicts of site, depth, head, score and reasons (the figures that weigh most, in words).
    """
    scores: dict[tuple[str, int], dict[str, float]] = {}
    depths = {record["site"]: record["depth"] for record in records}
    for name, direction in worrying().items():
        heads = [r for r in records if r["statistic"] == name and r["head"] is not None]
        middle, away = distances([r["value"] for r in heads])
        for record, distance in zip(heads, away, strict=True):
            excess = (distance if direction == "high" else -distance) - 2
            words = f"{in_words(name)} {record['value']:.3g} (median {middle:.3g})"
            scores.setdefault((record["site"], record["head"]), {})[words] = min(max(0.0, excess), MOST)
    for alert in alerts:
        if alert["head"] is not None:
            words = alert["sentence"]
            scores.setdefault((alert["site"], alert["head"]), {})[words] = MOST
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
    """Give the median, and how many robust standard deviations each value lies from it."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 3:
        return math.nan, [0.0] * len(values)
    logarithmic = min(finite) > 0
    scaled = [math.log(v) if logarithmic and math.isfinite(v) else v for v in values]
    known = [v for v in scaled if math.isfinite(v)]
    middle = statistics.median(known)
    away = [abs(v - middle) for v in known]
    # Where all heads are alike to a few per cent, what is left between them tells nothing.
    least = LEAST if logarithmic else LEAST * max(abs(v) for v in known)
    spread = max(
        1.4826 * statistics.median(away), 1.2533 * statistics.fmean(away) if not logarithmic else 0.0, least, 1e-12
    )
    return statistics.median(finite), [(v - middle) / spread if math.isfinite(v) else 0.0 for v in scaled]


def in_words(statistic: str) -> str:
    """Give a statistic's name in words, with its product."""
    name, _, kind = statistic.rpartition("_")
    return f"{name.replace('_', ' ')} of {PRODUCTS[kind]}" if kind in PRODUCTS else statistic.replace("_", " ")
