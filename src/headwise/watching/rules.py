"""The rules of alerts and their limits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from headwise.files.health_records import Record
from headwise.watching.losses import BEFORE, LOSS_SPIKE

# A sharp head whose mean distance is this near to 0 or 1 reads its own token or its neighbour.
NEIGHBOUR = 0.1


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits beyond which a figure raises an alert. None switches an alert off.

    A figure that is NaN or infinite raises `not_finite` and no other alert, whatever the limits.

    Attributes:
        entropy_share: entropy collapse, where a head's mean entropy falls below this share of log(allowed keys), having
            been above it before: heads that a checkpoint brings along with one clear key are no collapse. An audit,
            which reads once, tells of every head below as sharp: nothing tells there whether it ever was otherwise.
        max_logit: logit growth, where a head's largest logit exceeds this; 100 is the limit of QK-clip (Kimi K2).
        token_cosine: over-smoothing, where the mean cosine of the tokens that enter a layer exceeds this.
        high_frequency: rank collapse, where less than this share of the tokens' norm is not their mean: they are one
            vector.
        effective_rank: low rank, where the effective rank of a head's W_KᵀW_Q or W_OW_V falls below this, having been
            above.
        output_norm: a dead head, where a head's mean output norm is below this share of the largest of its layer, or
            zero.
        loss_spike: a spike of the loss, where the loss given to `step()` lies this many standard deviations above the
            mean of the fifty steps before.
        redundancy: redundancy, where a head's mean cosine with the other maps of its layer exceeds this.
        redundancy_entropy: maps that are nearly uniform (an entropy share above this) are alike by themselves and are
            no alert.

    Example:
        >>> import torch, headwise
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> watch = headwise.watch(model, thresholds=headwise.Thresholds(max_logit=50.0, redundancy=None))
    """

    entropy_share: float | None = 0.05
    max_logit: float | None = 100.0
    token_cosine: float | None = 0.99
    high_frequency: float | None = 0.05
    effective_rank: float | None = 2.0
    output_norm: float | None = 0.005
    loss_spike: float | None = 4.3
    redundancy: float | None = 0.99
    redundancy_entropy: float = 0.9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"Thresholds.{field.name} must be a positive number or None, got {value!r}")


# The figures of one step that are finite, by statistic: no limit is passed by NaN.
ByStatistic = dict[str, list[Record]]


@dataclass(frozen=True)
class Finding:
    """What a rule says of one figure, ill or well.

    Attributes:
        record: the figure.
        threshold: the limit it was held against.
        ill: whether it passed the limit.
        says: what is so, with room for {place}, {value} and, where a change is told, {verb} and {to}.
    """

    record: Record
    threshold: float
    ill: bool
    says: str


class Rule(ABC):
    """Holds the figures of a step against one limit."""

    alert: ClassVar[str]
    # How a figure that was healthy before came here; one that was not "is" here.
    verb: ClassVar[str] = "is"
    # Whether a figure that was never healthy is told of too.
    at_once: ClassVar[bool] = True
    # Whether an alert is told for each statistic, or once for each head whatever the statistic.
    per_statistic: ClassVar[bool] = True
    # What the alert is called at the one reading of a checkpoint, where it is not the same there.
    of_checkpoint: ClassVar[str] = ""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds

    @abstractmethod
    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each figure whether it is ill.

        Args:
            finite: the finite figures, by statistic.
            records: all of the step, in the order in which they were read.
        """

    def adds(self, record: Record, finite: ByStatistic) -> str:
        """Return what is to be said besides at the one reading of a checkpoint."""
        return ""


def _below(records: Iterable[Record], limit: float, says: str) -> Iterator[Finding]:
    return (Finding(record, limit, record["value"] < limit, says) for record in records)


def _above(records: Iterable[Record], limit: float, says: str) -> Iterator[Finding]:
    return (Finding(record, limit, record["value"] > limit, says) for record in records)


class NotFinite(Rule):
    """Tells of a head or layer that has a figure that is not finite; the first such figure stands for all."""

    alert = "not_finite"
    per_statistic = False

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each head and layer whether it diverged."""
        places: dict[tuple[str, int | None], Record] = {}
        for record in records:
            place = (record["site"], record["head"])
            if place not in places or (math.isfinite(places[place]["value"]) and not math.isfinite(record["value"])):
                places[place] = record
        for record in places.values():
            words = f"{record['statistic'].replace('_', ' ')} of {{place}}"
            says = f"{'the loss' if record['statistic'] == LOSS_SPIKE else words} is {{value}}: the training diverged"
            yield Finding(record, math.inf, not math.isfinite(record["value"]), says)


class EntropyCollapse(Rule):
    """Tells of a head whose entropy fell below a share of its range."""

    alert, verb = "entropy_collapse", "fell"
    # Heads that a checkpoint brings along with one clear key are no collapse.
    at_once = False
    of_checkpoint = "sharp_head"

    def adds(self, record: Record, finite: ByStatistic) -> str:
        """Say where a sharp head looks: one that reads its neighbour or its own token is healthy in most models."""
        place = record["site"], record["head"]
        away = next((r["value"] for r in finite.get("attention_distance", ()) if (r["site"], r["head"]) == place), None)
        if away is None:
            return ": it looks at about one key for each query"
        near = " (a positional head)" if min(abs(away), abs(away - 1)) < NEIGHBOUR else ""
        return f": it looks at about one key for each query, {away:.3g} tokens away on the mean{near}"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each head whether its entropy is below the limit."""
        if (limit := self.thresholds.entropy_share) is not None:
            says = f"entropy of {{place}} {{verb}} below {100 * limit:.3g} % of its range ({{to}}{{value:.3g}})"
            yield from _below(finite.get("entropy_share", ()), limit, says)


class LogitGrowth(Rule):
    """Tells of a head whose largest logit rose above the limit."""

    alert, verb = "logit_growth", "rose"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each head whether its largest logit is above the limit."""
        if (limit := self.thresholds.max_logit) is not None:
            says = f"the largest logit of {{place}} {{verb}} above {limit:g} ({{to}}{{value:.4g}})"
            yield from _above(finite.get("max_logit", ()), limit, says)


class LossSpike(Rule):
    """Tells of a step whose loss lies far above those of the steps before."""

    alert, verb = "loss_spike", "rose"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each step whether its loss is above the limit."""
        if (limit := self.thresholds.loss_spike) is not None:
            says = (
                f"the loss {{verb}} {{to}}{{value:.3g}} standard deviations above the {BEFORE} steps before ({limit:g})"
            )
            yield from _above(finite.get(LOSS_SPIKE, ()), limit, says)


class OverSmoothing(Rule):
    """Tells of a layer whose tokens point the same way."""

    alert = "over_smoothing"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each layer whether the cosine of its tokens is above the limit."""
        if (limit := self.thresholds.token_cosine) is not None:
            says = f"tokens that enter {{place}} are alike: mean cosine {{value:.3f}}, above {limit:g}"
            yield from _above(finite.get("token_cosine", ()), limit, says)


class RankCollapse(Rule):
    """Tells of a layer whose tokens are nearly one vector."""

    alert = "rank_collapse"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return an alert for each layer whose tokens are nearly equal: little of their norm is left without their
        mean."""
        if (limit := self.thresholds.high_frequency) is not None:
            says = (
                f"tokens that enter {{place}} are nearly one vector: {{value:.2%}} of their norm is not their mean, "
                f"below {limit:.3%}"
            )
            yield from _below(finite.get("high_frequency", ()), limit, says)


class LowRank(Rule):
    """Tells of a head one of whose products of weights lost its rank."""

    alert, verb = "low_rank", "fell"
    # A product that never had more rank was made so.
    at_once = False

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each head and product whether its effective rank is below the limit."""
        if (limit := self.thresholds.effective_rank) is not None:
            for name, product in (("effective_rank_qk", "W_KᵀW_Q"), ("effective_rank_vo", "W_OW_V")):
                says = f"effective rank of {product} of {{place}} {{verb}} below {limit:g} ({{to}}{{value:.3g}})"
                yield from _below(finite.get(name, ()), limit, says)


class DeadHead(Rule):
    """Tells of a head whose outputs are small beside those of its layer's loudest head."""

    alert = "dead_head"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each head whether it says next to nothing."""
        if (limit := self.thresholds.output_norm) is None:
            return
        layers: dict[str, list[Record]] = {}
        for record in finite.get("output_norm", ()):
            layers.setdefault(record["site"], []).append(record)
        for heads in layers.values():
            # The largest: where most heads of a layer are dead, its median is that of dead heads.
            largest = max(record["value"] for record in heads)
            quiet = (
                f"{{place}} says next to nothing: its mean output norm {{value:.3g}} is below {limit:.3g} of its "
                f"layer's largest, {largest:.3g}"
            )
            for record in heads:
                silent = record["value"] == 0
                says = "{place} says nothing: its outputs are zero" if silent else quiet
                yield Finding(record, limit * largest, silent or record["value"] < limit * largest, says)


class Redundancy(Rule):
    """Tells of a head that attends like the others of its layer."""

    alert = "redundancy"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Say of each head whether its map is that of others, where maps are not alike by being uniform."""
        if (limit := self.thresholds.redundancy) is None:
            return
        shares = {(r["site"], r["head"]): r["value"] for r in finite.get("entropy_share", ())}
        says = f"{{place}} attends like the other heads of its layer: mean cosine {{value:.3f}}, above {limit:g}"
        for record in finite.get("head_redundancy", ()):
            uniform = shares.get((record["site"], record["head"]), 0.0) > self.thresholds.redundancy_entropy
            yield Finding(record, limit, record["value"] > limit and not uniform, says)


# Of a reading, in the order in which their alerts are told.
RULES: tuple[type[Rule], ...] = (
    NotFinite,
    EntropyCollapse,
    LogitGrowth,
    OverSmoothing,
    RankCollapse,
    LowRank,
    DeadHead,
    Redundancy,
)
# Of the loss of every step.
OF_STEPS: tuple[type[Rule], ...] = (NotFinite, LossSpike)
