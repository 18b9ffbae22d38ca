"""Weight alerts: which figures of the weights are beyond their limit; one rule a class."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from headwise.auditing.records import WeightAlert, WeightRecord, place_of
from headwise.auditing.weights import PRODUCTS, Read, in_words
from headwise.statistics.alert_remedies import remedy_for_weights

ByStatistic = dict[str, list[WeightRecord]]


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


@dataclass(frozen=True)
class Ill:
    """A figure beyond its limit, and what is so."""

    record: WeightRecord
    threshold: float
    says: str


class WeightRule(ABC):
    """Holds the figures of all weights against one limit."""

    alert: ClassVar[str]

    def __init__(self, limits: WeightThresholds) -> None:
        self.limits = limits

    @abstractmethod
    def ill(self, records: ByStatistic) -> Iterator[Ill]:
        """Return the figures beyond the limit."""


class NearlyRankOne(WeightRule):
    """Tells of a head one of whose products is nearly one direction."""

    alert = "rank_collapse"

    def ill(self, records: ByStatistic) -> Iterator[Ill]:
        """Return the stable ranks below the limit; that of a product of zeros is 0 and says nothing."""
        if (limit := self.limits.stable_rank) is None:
            return
        for kind, product in PRODUCTS.items():
            for record in records.get(f"stable_rank_{kind}", ()):
                if 0 < record["value"] < limit:
                    says = (
                        f"{product} of {place_of(record)} is nearly of rank one: its stable rank is "
                        f"{record['value']:.3f}, below {limit:g}"
                    )
                    yield Ill(record, limit, says)


class DeadWeights(WeightRule):
    """Tells of a head that writes next to nothing."""

    alert = "dead_head"

    def ill(self, records: ByStatistic) -> Iterator[Ill]:
        """Return the norms of W_OW_V that are small beside the largest of their layer, or zero."""
        if (limit := self.limits.dead) is None:
            return
        layers: dict[str, list[WeightRecord]] = {}
        for record in records.get("frobenius_norm_vo", ()):
            layers.setdefault(record["site"], []).append(record)
        for heads in layers.values():
            # The largest: where most heads of a layer are dead, its median is that of dead heads.
            largest = max(record["value"] for record in heads)
            for record in heads:
                if record["value"] < limit * largest or record["value"] == 0:
                    says = (
                        f"{place_of(record)} writes next to nothing: the norm of W_OW_V is {record['value']:.3g}, its "
                        f"layer's largest {largest:.3g}"
                    )
                    yield Ill(record, limit * largest, says)


class LargeLogits(WeightRule):
    """Tells of a head whose weights can make logits far larger than those of other heads."""

    alert = "logit_growth"

    def ill(self, records: ByStatistic) -> Iterator[Ill]:
        """Return the spectral norms of W_KᵀW_Q above a multiple of the model's median."""
        heads = records.get("spectral_norm_qk", ())
        if (times := self.limits.growth) is None or not heads:
            return
        middle = statistics.median(record["value"] for record in heads)
        for record in heads:
            if record["value"] > times * middle:
                says = (
                    f"{place_of(record)} can make large logits: the spectral norm of W_KᵀW_Q is "
                    f"{record['value']:.3g}, {record['value'] / middle:.1f} times the model's median"
                )
                yield Ill(record, times * middle, says)


class DecayedRank(WeightRule):
    """Tells of a head that weight decay has made low-rank."""

    alert = "low_rank_by_decay"

    def ill(self, records: ByStatistic) -> Iterator[Ill]:
        """Return the pseudo-ranks below the limit where the factors are balanced, as decay alone makes them."""
        if (limit := self.limits.decayed_rank) is None:
            return
        for kind, product in PRODUCTS.items():
            known = [r for r in records.get(f"imbalance_{kind}", ()) if r["head"] is not None]
            balance = {(r["site"], r["head"]): r["value"] for r in known}
            for record in records.get(f"pseudo_rank_{kind}", ()):
                share = balance.get((record["site"], record["head"]), math.inf)
                if record["value"] < limit and share < self.limits.balance:
                    says = (
                        f"weight decay has made {product} of {place_of(record)} low-rank: 95 % of its singular values' "
                        f"sum lie in {100 * record['value']:.0f} % of the head's dimensions, and its factors are "
                        f"balanced to {share:.3f}"
                    )
                    yield Ill(record, limit, says)


# In the order in which their alerts are told.
RULES: tuple[type[WeightRule], ...] = (NearlyRankOne, DeadWeights, LargeLogits, DecayedRank)


def weight_alerts(read: Read, limits: WeightThresholds) -> list[WeightAlert]:
    """Return an alert for every figure beyond its limit, and for weights that are not finite."""
    by_statistic: ByStatistic = {}
    for record in read.records:
        by_statistic.setdefault(record["statistic"], []).append(record)
    rules = [rule(limits) for rule in RULES]
    alerts = [_of_figure(rule.alert, one) for rule in rules for one in rule.ill(by_statistic)]
    alerts += [_of_broken(where) for where in read.not_finite]
    return alerts + list(_overflown(read.records))


def _of_figure(alert: str, ill: Ill) -> WeightAlert:
    record = ill.record
    place = (record["site"], record["depth"], record["head"])
    return _alert(alert, place, record["statistic"], record["value"], ill.threshold, ill.says)


def _of_broken(where: str) -> WeightAlert:
    says = f"{where} holds NaN or infinity: its figures are left out"
    return _alert("not_finite", (where.rpartition(".")[0], None, None), "finite", 0.0, 1.0, says)


def _overflown(records: list[WeightRecord]) -> Iterator[WeightAlert]:
    """Tell once of each layer that has a figure which single precision cannot hold."""
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
