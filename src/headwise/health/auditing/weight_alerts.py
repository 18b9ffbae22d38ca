"""Alerts on figures of the weights that are beyond their limits; each rule is a class."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from headwise.health.auditing.records import WeightAlert, WeightRecord, place_of
from headwise.health.auditing.weights import PRODUCTS, Read, in_words
from headwise.health.statistics.alert_remedies import remedy_for_weights

ByStatistic = dict[str, list[WeightRecord]]


@dataclass(frozen=True, kw_only=True)
class WeightThresholds:
    """The limits beyond which a weight raises an alert. None switches an alert off.

    Attributes:
        stable_rank: rank collapse, if a head's product has a smaller stable rank: one direction dominates it.
        dead: a dead head, if the Frobenius norm of W_OW_V is below this share of its layer's largest, or zero.
        growth: logit growth, if the spectral norm of W_KᵀW_Q is above this multiple of the model's median.
        decayed_rank: low rank by weight decay, if the pseudo-rank is smaller than this...
        balance: ...and the imbalance of the factors, which decay reduces, is smaller than this.
    """

    stable_rank: float | None = 1.2
    dead: float | None = 0.005
    growth: float | None = 10.0
    decayed_rank: float | None = 0.25
    balance: float = 0.1


@dataclass(frozen=True)
class Violation:
    """A figure beyond its limit, with the limit and a sentence about it."""

    record: WeightRecord
    threshold: float
    says: str


class WeightRule(ABC):
    """A rule that compares the figures of all weights with one limit."""

    alert: ClassVar[str]

    def __init__(self, limits: WeightThresholds) -> None:
        self.limits = limits

    @abstractmethod
    def violations(self, records: ByStatistic) -> Iterator[Violation]:
        """Return the figures beyond the limit."""


class NearlyRankOne(WeightRule):
    """The rule for a head with a product of nearly rank one."""

    alert = "rank_collapse"

    def violations(self, records: ByStatistic) -> Iterator[Violation]:
        """Return the stable ranks below the limit, except 0, which is that of a product of zeros."""
        if (limit := self.limits.stable_rank) is None:
            return
        for kind, product in PRODUCTS.items():
            for record in records.get(f"stable_rank_{kind}", ()):
                if 0 < record["value"] < limit:
                    says = (
                        f"{product} of {place_of(record)} is nearly of rank one: its stable rank is "
                        f"{record['value']:.3f}, below {limit:g}"
                    )
                    yield Violation(record, limit, says)


class DeadWeights(WeightRule):
    """The rule for a head that writes almost nothing."""

    alert = "dead_head"

    def violations(self, records: ByStatistic) -> Iterator[Violation]:
        """Return the norms of W_OW_V that are small relative to the largest of their layer, or zero."""
        if (limit := self.limits.dead) is None:
            return
        layers: dict[str, list[WeightRecord]] = {}
        for record in records.get("frobenius_norm_vo", ()):
            layers.setdefault(record["site"], []).append(record)
        for heads in layers.values():
            # Not relative to the median: if most heads of a layer are dead, its median is that of dead heads.
            largest = max(record["value"] for record in heads)
            for record in heads:
                if record["value"] < limit * largest or record["value"] == 0:
                    says = (
                        f"{place_of(record)} writes next to nothing: the norm of W_OW_V is {record['value']:.3g}, "
                        f"below {100 * limit:.3g} % of its layer's largest ({largest:.3g})"
                    )
                    yield Violation(record, limit * largest, says)


class LargeLogits(WeightRule):
    """The rule for a head whose weights can make logits far larger than those of other heads."""

    alert = "logit_growth"

    def violations(self, records: ByStatistic) -> Iterator[Violation]:
        """Return the spectral norms of W_KᵀW_Q above a multiple of the model's median."""
        heads = records.get("spectral_norm_qk", ())
        if (times := self.limits.growth) is None or not heads:
            return
        middle = statistics.median(record["value"] for record in heads)
        for record in heads:
            if record["value"] > times * middle:
                says = (
                    f"{place_of(record)} can make large logits: the spectral norm of W_KᵀW_Q is "
                    f"{_figure(record['value'])}, {record['value'] / middle:,.0f} times the model's median "
                    f"(limit: {times:g})"
                )
                yield Violation(record, times * middle, says)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


class DecayedRank(WeightRule):
    """The rule for a head that weight decay has made low-rank."""

    alert = "low_rank_by_decay"

    def violations(self, records: ByStatistic) -> Iterator[Violation]:
        """Return the pseudo-ranks below the limit of products whose factors are balanced, as only decay makes them."""
        if (limit := self.limits.decayed_rank) is None:
            return
        for kind, product in PRODUCTS.items():
            imbalances = [r for r in records.get(f"imbalance_{kind}", ()) if r["head"] is not None]
            balance = {(r["site"], r["head"]): r["value"] for r in imbalances}
            for record in records.get(f"pseudo_rank_{kind}", ()):
                share = balance.get((record["site"], record["head"]), math.inf)
                if record["value"] < limit and share < self.limits.balance:
                    says = (
                        f"weight decay has made {product} of {place_of(record)} low-rank: 95 % of its singular values' "
                        f"sum lie in {100 * record['value']:.0f} % of the head's dimensions "
                        f"(limit: {100 * limit:.0f} %), and its factors are balanced to {share:.3f} "
                        f"(limit: {self.limits.balance:g})"
                    )
                    yield Violation(record, limit, says)


# In the order of their alerts.
RULES: tuple[type[WeightRule], ...] = (NearlyRankOne, DeadWeights, LargeLogits, DecayedRank)


def weight_alerts(read: Read, limits: WeightThresholds) -> list[WeightAlert]:
    """Return an alert for every figure beyond its limit, and for weights that are not finite."""
    by_statistic: ByStatistic = {}
    for record in read.records:
        by_statistic.setdefault(record["statistic"], []).append(record)
    rules = [rule(limits) for rule in RULES]
    alerts = [_of_figure(rule.alert, violation) for rule in rules for violation in rule.violations(by_statistic)]
    alerts += [_of_broken(name) for name in read.not_finite]
    return alerts + list(_overflown(read.records))


def _of_figure(alert: str, violation: Violation) -> WeightAlert:
    record = violation.record
    place = (record["site"], record["depth"], record["head"])
    return _alert(alert, place, record["statistic"], record["value"], violation.threshold, violation.says)


def _of_broken(name: str) -> WeightAlert:
    says = f"{name} holds NaN or infinity: its figures are left out"
    return _alert("not_finite", (name.rpartition(".")[0], None, None), "finite", 0.0, 1.0, says)


def _overflown(records: list[WeightRecord]) -> Iterator[WeightAlert]:
    """Return one alert for each layer with a figure that single precision cannot hold."""
    first: dict[str, WeightRecord] = {}
    for record in records:
        if not math.isfinite(record["value"]):
            first.setdefault(record["site"], record)
    for site, record in first.items():
        says = (
            f"the weights of {site} are too large for single precision: {in_words(record['statistic'])} is "
            f"{record['value']}"
        )
        yield _alert("not_finite", (site, record["depth"], None), record["statistic"], record["value"], math.inf, says)


def _alert(
    alert: str, place: tuple[str, int | None, int | None], statistic: str, value: float, threshold: float, says: str
) -> WeightAlert:
    remedy = remedy_for_weights(alert)
    return {
        "alert": alert,
        "site": place[0],
        "depth": place[1],
        "head": place[2],
        "statistic": statistic,
        "value": value,
        "threshold": threshold,
        "sentence": says,
        "remedy": remedy.text,
        "source": remedy.source,
    }
