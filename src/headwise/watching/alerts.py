"""Alerts: which figures are worth a sentence, and what to do about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from .records import Record


class HealthWarning(UserWarning):
    """Warns of the health of a head or layer."""


class HealthAlert(RuntimeError):
    """Stops a training for the health of a head or layer, where `on_alert="raise"` asks for it."""

    def __init__(self, alerts: list[Record]) -> None:
        super().__init__("\n".join(told(alerts)))
        self.alerts = alerts


def told(alerts: list[Record]) -> list[str]:
    """Give one sentence per kind of alert: the first of its kind, how many more there are, and the remedy."""
    kinds: dict[str, list[Record]] = {}
    for alert in alerts:
        kinds.setdefault(alert["alert"], []).append(alert)
    texts = []
    for first, *others in kinds.values():
        more = f", and {len(others)} more like it" if others else ""
        texts.append(f"{first['sentence']}{more}; {first['remedy']} ({first['source']})")
    return texts


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits beyond which a figure raises an alert. None switches an alert off.

    Attributes:
        entropy_share: entropy collapse, where a head's mean entropy falls below this share of log(allowed keys), having been
            above it before: heads that a checkpoint brings along with one clear key are no collapse.
        max_logit: logit growth, where a head's largest logit exceeds this; 100 is the limit of QK-clip (Kimi K2).
        token_cosine: over-smoothing, where the mean cosine of the tokens that enter a layer exceeds this.
        high_frequency: rank collapse, where less than this share of the tokens' norm is not their mean: they are one vector.
        effective_rank: low rank, where the effective rank of a head's W_KᵀW_Q or W_OW_V falls below this, having been above.
        output_norm: a dead head, where a head's mean output norm is below this share of the median of its layer.
        redundancy: redundancy, where a head's mean cosine with the other maps of its layer exceeds this.
        redundancy_entropy: maps that are nearly uniform (an entropy share above this) are alike by themselves and are no alert.
    """

    entropy_share: float | None = 0.05
    max_logit: float | None = 100.0
    token_cosine: float | None = 0.95
    high_frequency: float | None = 0.05
    effective_rank: float | None = 2.0
    output_norm: float | None = 0.01
    redundancy: float | None = 0.95
    redundancy_entropy: float = 0.9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"Thresholds.{field.name} must be a positive number or None, got {value!r}")


class Remedy(NamedTuple):
    """What helps, and who showed it."""

    text: str
    source: str


REMEDIES = {
    "entropy_collapse": Remedy(
        "SigmaReparam or QKNorm bound it; a lower learning rate or a longer warm-up delays it",
        "Zhai et al. 2023, arXiv 2303.06296; Dehghani et al. 2023, arXiv 2302.05442",
    ),
    "logit_growth": Remedy(
        "QKNorm, QKClip or SigmaReparam bound the logits; SoftCap does, and does not prevent collapse",
        "Dehghani et al. 2023, arXiv 2302.05442; Kimi K2 2025, arXiv 2507.20534",
    ),
    "over_smoothing": Remedy(
        "NeuTRENO, AttnScale or FeatScale keep tokens apart; a high cosine is a diagnosis and no score of quality",
        "Nguyen et al. 2023, arXiv 2312.00751; Wang et al. 2022, arXiv 2203.05962",
    ),
    "rank_collapse": Remedy(
        "NeuTRENO or ValueResidual carry early values on; check that skip connections are in place",
        "Dong et al. 2021, arXiv 2103.03404; Zhou et al. 2024, arXiv 2410.17897",
    ),
    "low_rank": Remedy(
        "weight decay on queries, keys, values and output lowers their rank: give them a smaller one (parameter_groups)",
        "Kobayashi et al. 2024, arXiv 2410.23819",
    ),
    "dead_head": Remedy(
        "the head can be pruned, or DropHead spreads the work over heads in the next run",
        "Michel et al. 2019, arXiv 1905.10650; Zhou et al. 2020, arXiv 2004.13342",
    ),
    "redundancy": Remedy(
        "Disagreement or DropHead push heads apart",
        "Li et al. 2018, arXiv 1810.10183; Zhou et al. 2020, arXiv 2004.13342",
    ),
}


class _Found(NamedTuple):
    alert: str
    record: Record
    threshold: float
    ill: bool
    was: str
    # Whether a figure that was never healthy is told of too.
    at_once: bool = True


class Judge:
    """Turns the records of one reading into alerts: once when a figure passes its limit, and again only after it recovered."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._healthy: dict[tuple[str, str, int | None], int] = {}
        self._told: set[tuple[str, str, int | None]] = set()

    def alerts(self, records: Iterable[Record]) -> list[Record]:
        """Give the new alerts of the records of one step."""
        given = list(records)
        by_statistic: dict[str, list[Record]] = {}
        for record in given:
            by_statistic.setdefault(record["statistic"], []).append(record)
        found = [*self._limits(by_statistic), *self._dead(by_statistic), *self._redundant(by_statistic)]
        return [alert for one in found if (alert := self._told_of(one)) is not None]

    def _told_of(self, found: _Found) -> Record | None:
        record = found.record
        key = (found.alert, record["site"], record["head"])
        if not found.ill:
            self._healthy[key] = record["step"]
            self._told.discard(key)
            return None
        if key in self._told or (key not in self._healthy and not found.at_once):
            return None
        self._told.add(key)
        since = self._healthy.get(key)
        when = "" if since is None else f" in {record['step'] - since} steps"
        place = record["site"] + ("" if record["head"] is None else f" head {record['head']}")
        remedy = REMEDIES[found.alert]
        return {
            "alert": found.alert,
            **{name: record[name] for name in ("site", "depth", "head", "step", "statistic", "value")},
            "threshold": found.threshold,
            "sentence": found.was.format(place=place, value=record["value"]) + when,
            "remedy": remedy.text,
            "source": remedy.source,
        }

    def _limits(self, records: dict[str, list[Record]]) -> Iterable[_Found]:
        limits = self.thresholds
        if (limit := limits.entropy_share) is not None:
            for record in records.get("entropy_share", ()):
                text = f"entropy of {{place}} fell below {100 * limit:.3g} % of its range (to {{value:.2g}})"
                yield _Found("entropy_collapse", record, limit, not record["value"] >= limit, text, at_once=False)
        if (limit := limits.max_logit) is not None:
            for record in records.get("max_logit", ()):
                text = f"the largest logit of {{place}} rose above {limit:g} (to {{value:.4g}})"
                yield _Found("logit_growth", record, limit, not record["value"] <= limit, text)
        if (limit := limits.token_cosine) is not None:
            for record in records.get("token_cosine", ()):
                text = f"tokens that enter {{place}} are alike: mean cosine {{value:.3f}}, above {limit:g}"
                yield _Found("over_smoothing", record, limit, not record["value"] <= limit, text)
        if (limit := limits.high_frequency) is not None:
            for record in records.get("high_frequency", ()):
                text = f"tokens that enter {{place}} are nearly one vector: {{value:.2%}} of their norm is not their mean, below {limit:.3%}"
                yield _Found("rank_collapse", record, limit, not record["value"] >= limit, text)

        if (limit := limits.effective_rank) is not None:
            for name, product in (("effective_rank_qk", "W_KᵀW_Q"), ("effective_rank_vo", "W_OW_V")):
                for record in records.get(name, ()):
                    text = f"effective rank of {product} of {{place}} fell below {limit:g} (to {{value:.3g}})"
                    yield _Found("low_rank", record, limit, not record["value"] >= limit, text, at_once=False)

    def _dead(self, records: dict[str, list[Record]]) -> Iterable[_Found]:
        limit = self.thresholds.output_norm
        layers: dict[str, list[Record]] = {}
        for record in records.get("output_norm", ()) if limit is not None else ():
            layers.setdefault(record["site"], []).append(record)
        for heads in layers.values():
            middle = statistics.median(record["value"] for record in heads)
            for record in heads:
                text = f"{{place}} says next to nothing: its mean output norm {{value:.3g}} is below {limit:.3g} of its layer's median {middle:.3g}"
                yield _Found("dead_head", record, limit * middle, record["value"] < limit * middle, text)

    def _redundant(self, records: dict[str, list[Record]]) -> Iterable[_Found]:
        limit = self.thresholds.redundancy
        if limit is None:
            return
        shares = {(r["site"], r["head"]): r["value"] for r in records.get("entropy_share", ())}
        for record in records.get("head_redundancy", ()):
            uniform = shares.get((record["site"], record["head"]), 0.0) > self.thresholds.redundancy_entropy
            text = f"{{place}} attends like the other heads of its layer: mean cosine {{value:.3f}}, above {limit:g}"
            yield _Found("redundancy", record, limit, record["value"] > limit and not uniform, text)
