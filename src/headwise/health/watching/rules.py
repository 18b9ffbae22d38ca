"""Rules that decide which figures raise alerts, and their thresholds; the judge in `alerts.py` applies them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from headwise.health.health_records import Record
from headwise.health.watching.losses import BEFORE, LOSS_SPIKE, LOSS_WAVES, Spikes

# A sharp head whose mean distance is this close to 0 or 1 attends to its own token or its neighbour.
NEIGHBOUR = 0.1
PRODUCTS = {"effective_rank_qk": "W_KᵀW_Q", "effective_rank_vo": "W_OW_V"}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits beyond which a figure raises an alert; None switches an alert off.

    A figure that is NaN or infinite raises `not_finite` and no other alert, whatever the limits.

    Attributes:
        entropy_share: entropy collapse: a head's mean entropy falls below this share of log(allowed keys) after having
            been above it. Heads of a checkpoint that already attend to a single key are not a collapse. An audit reads
            once and has no history: it reports every head below the limit as sharp.
        max_logit: logit growth: a head's largest logit exceeds this; 100 is the limit of QK-clip (Kimi K2).
        token_cosine: over-smoothing: the mean cosine between the tokens that enter a layer exceeds this.
        high_frequency: rank collapse: less than this share of the tokens' norm remains after subtracting their mean, so
            that they are nearly one vector.
        effective_rank: low rank: the effective rank of a head's W_KᵀW_Q or W_OW_V falls below this after having been
            above it.
        output_norm: dead head: a head's mean output norm is zero, or below this share of the largest in its layer.
        loss_spike: loss spike: the loss passed to `step()` is more than this many standard deviations above the mean of
            the fifty steps before, and so is that of a neighbouring step by more than 2, or it alone by more than 9.
        redundancy: redundancy: a head's mean cosine with the other maps of its layer exceeds this.
        loss_waves: sorted batches: the losses of neighbouring steps move together by more than this share of their mean
            (their autocorrelation times their spread, over fifty steps).
        later_keys: lost mask: the queries of a layer may see more than this share of the later keys, after readings in
            which they saw none. A layer that sees later keys from the first reading on is no alert.
        redundancy_entropy: no redundancy alert for a head with an entropy share above this: maps that are nearly
            uniform are always alike.

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
    loss_spike: float | None = Spikes.LIMIT
    redundancy: float | None = 0.99
    redundancy_entropy: float = 0.9
    later_keys: float | None = 1e-5
    loss_waves: float | None = 0.1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"Thresholds.{field.name} must be a positive number or None, got {value!r}")


# The finite figures of one step, by statistic; NaN exceeds no limit.
ByStatistic = dict[str, list[Record]]


@dataclass(frozen=True)
class Finding:
    """Result of a rule for one figure, healthy or not.

    Attributes:
        record: the figure.
        threshold: the limit that the figure is compared with.
        ill: whether the figure is beyond the limit.
        says: the template of the sentence, with the fields {place}, {value}, {limit}, {percent} (the limit in per cent)
            and, for a change, {verb} and {now}.
    """

    record: Record
    threshold: float
    ill: bool
    says: str


class Rule(ABC):
    """Comparison of the figures of a step with one limit."""

    alert: ClassVar[str]
    # The figures that it judges; empty for all.
    reads: ClassVar[tuple[str, ...]] = ()
    # What a figure did that was healthy before, such as "fell below", and what any other figure does.
    verb: ClassVar[str] = ""
    state: ClassVar[str] = ""
    # Whether a figure that has never been healthy raises an alert too.
    at_once: ClassVar[bool] = True
    # Whether a head raises one alert for each statistic, or a single one for all.
    per_statistic: ClassVar[bool] = True
    # Whether the sentence says within how many steps of a healthy reading; some say so themselves.
    says_since: ClassVar[bool] = True
    # Whether an audit, which reads once, applies the rule.
    in_audits: ClassVar[bool] = True
    # The name of the alert in an audit of a checkpoint, if it is another one there.
    of_checkpoint: ClassVar[str] = ""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds

    @abstractmethod
    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return a finding for each figure of the rule."""

    def adds(self, record: Record, finite: ByStatistic) -> str:
        """Return what an audit of a checkpoint appends to the sentence."""
        return ""


class Limit(Rule):
    """A rule that compares every figure that it reads with one of the thresholds."""

    # The threshold, and whether figures above it are ill; otherwise those below it.
    threshold: ClassVar[str]
    above: ClassVar[bool] = True
    # As `Finding.says`.
    says: ClassVar[str]

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return a finding for each figure; none if the threshold is None."""
        if (limit := getattr(self.thresholds, self.threshold)) is not None:
            for record in (record for name in self.reads for record in finite.get(name, ())):
                ill = record["value"] > limit if self.above else record["value"] < limit
                yield Finding(record, limit, ill, self.says)


class NotFinite(Rule):
    """Rule for heads and layers with a figure that is NaN or infinite; only the first such figure is reported."""

    alert = "not_finite"
    per_statistic = False

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return a finding for each head and layer: whether all its figures are finite."""
        places: dict[tuple[str, int | None], Record] = {}
        for record in records:
            place = (record["site"], record["head"])
            if place not in places or (math.isfinite(places[place]["value"]) and not math.isfinite(record["value"])):
                places[place] = record
        for record in places.values():
            name = f"{record['statistic'].replace('_', ' ')} of {{place}}"
            says = f"{'the loss' if record['statistic'] == LOSS_SPIKE else name} is {{value}}: the training diverged"
            yield Finding(record, math.inf, not math.isfinite(record["value"]), says)


class EntropyCollapse(Limit):
    """Rule for heads whose entropy fell below a share of its range."""

    alert, verb, state = "entropy_collapse", "fell below", "is below"
    reads = ("entropy_share",)
    # Heads of a checkpoint that already attend to a single key are not a collapse.
    at_once = False
    of_checkpoint = "sharp_head"
    threshold, above = "entropy_share", False
    says = "the entropy of {place} {verb} {percent:.3g} % of its range ({now}{value:.3g})"

    def adds(self, record: Record, finite: ByStatistic) -> str:
        """Return how far a sharp head attends; in most models a head on its own token or its neighbour is healthy."""
        place = record["site"], record["head"]
        distances = finite.get("attention_distance", ())
        distance = next((r["value"] for r in distances if (r["site"], r["head"]) == place), None)
        if distance is None:
            return ": it looks at about one key for each query"
        near = " (a positional head)" if min(abs(distance), abs(distance - 1)) < NEIGHBOUR else ""
        return f": it looks at about one key for each query, {distance:.3g} tokens away on average{near}"


class LogitGrowth(Limit):
    """Rule for heads whose largest logit is above a limit."""

    alert, verb, state = "logit_growth", "passed", "exceeds"
    reads = ("max_logit",)
    threshold = "max_logit"
    says = "the largest logit of {place} {verb} {limit:g} ({now}{value:.4g})"


class LossSpike(Limit):
    """Rule for steps whose loss is far above those of the steps before, as is that of a neighbour."""

    alert, verb, state = "loss_spike", "rose to", "is"
    says_since = False
    reads = (LOSS_SPIKE,)
    threshold = "loss_spike"
    says = f"the loss {{verb}} {{value:.3g}} standard deviations above the {BEFORE} steps before"

    def __init__(self, thresholds: Thresholds) -> None:
        super().__init__(thresholds)
        self._before = 0.0

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return the finding of a step; it is ill where a deviation that lasts is above the limit."""
        for finding in super().findings(finite, records):
            value = finding.record["value"]
            lasting, self._before = Spikes.lasting(self._before, value), value
            ill = lasting > finding.threshold
            yield replace(finding, record={**finding.record, "value": lasting} if ill else finding.record, ill=ill)


class SortedBatches(Limit):
    """Rule for trainings in which neighbouring batches are alike, so that the loss goes in waves."""

    alert = "sorted_batches"
    reads = (LOSS_WAVES,)
    threshold = "loss_waves"
    says = (
        f"the loss goes in waves ({{value:.0%}} of its mean over {BEFORE} steps): neighbouring batches are alike, as "
        "if they were sorted by class"
    )


class OverSmoothing(Limit):
    """Rule for layers whose input tokens point in nearly the same direction."""

    alert = "over_smoothing"
    reads = ("token_cosine",)
    threshold = "token_cosine"
    says = "tokens that enter {place} are alike (mean cosine {value:.3f}, limit {limit:g})"


class RankCollapse(Limit):
    """Rule for layers whose input tokens are nearly one vector."""

    alert = "rank_collapse"
    reads = ("high_frequency",)
    threshold, above = "high_frequency", False
    says = (
        "tokens that enter {place} are nearly one vector ({value:.2%} of their norm is not their mean, "
        "limit {limit:.3g})"
    )


class LowRank(Limit):
    """Rule for heads with a product of weights that lost its rank."""

    alert, verb, state = "low_rank", "fell below", "is below"
    reads = tuple(PRODUCTS)
    # A product that never had a higher rank has a low rank by design.
    at_once = False
    threshold, above = "effective_rank", False
    says = "the effective rank of {product} of {place} {verb} {limit:g} ({now}{value:.3g})"

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return a finding for each head and product."""
        for finding in super().findings(finite, records):
            product = PRODUCTS[finding.record["statistic"]]
            yield replace(finding, says=finding.says.replace("{product}", product))


class DeadHead(Rule):
    """Rule for heads whose outputs are small compared with the largest of their layer."""

    alert = "dead_head"
    reads = ("output_norm",)

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return a finding for each head: whether its output norm is zero or below the limit."""
        if (limit := self.thresholds.output_norm) is None:
            return
        layers: dict[str, list[Record]] = {}
        for record in finite.get("output_norm", ()):
            layers.setdefault(record["site"], []).append(record)
        for heads in layers.values():
            # The largest and not the median, because most heads of a layer may be dead.
            largest = max(record["value"] for record in heads)
            quiet = (
                f"{{place}} is nearly dead: its mean output norm {{value:.3g}} is below {limit:.3g} of its "
                f"layer's largest, {largest:.3g}"
            )
            for record in heads:
                silent = record["value"] == 0
                says = "{place} is dead: its output is zero" if silent else quiet
                yield Finding(record, limit * largest, silent or record["value"] < limit * largest, says)


class Redundancy(Rule):
    """Rule for heads that attend like the others of their layer."""

    alert = "redundancy"
    reads = ("head_redundancy",)

    def findings(self, finite: ByStatistic, records: list[Record]) -> Iterator[Finding]:
        """Return a finding for each head: whether its map equals those of other heads without being nearly uniform."""
        if (limit := self.thresholds.redundancy) is None:
            return
        shares = {(r["site"], r["head"]): r["value"] for r in finite.get("entropy_share", ())}
        says = f"{{place}} attends like the other heads of its layer (mean cosine {{value:.3f}}, limit {limit:g})"
        for record in finite.get("head_redundancy", ()):
            uniform = shares.get((record["site"], record["head"]), 0.0) > self.thresholds.redundancy_entropy
            yield Finding(record, limit, record["value"] > limit and not uniform, says)


class MaskLost(Limit):
    """Rule for layers whose queries see later keys, as they did not before."""

    alert = "mask_lost"
    reads = ("later_keys",)
    # Layers that always saw later keys are those of an encoder, or of a prefix.
    at_once = in_audits = False
    threshold = "later_keys"
    says = "queries of {place} see {value:.3%} of the later tokens, none before: the causal mask is lost"


# The rules for a reading, in the order of their alerts.
RULES: tuple[type[Rule], ...] = (
    NotFinite,
    MaskLost,
    EntropyCollapse,
    LogitGrowth,
    OverSmoothing,
    RankCollapse,
    LowRank,
    DeadHead,
    Redundancy,
)
# The rules for the loss of every step.
OF_STEPS: tuple[type[Rule], ...] = (NotFinite, SortedBatches, LossSpike)
