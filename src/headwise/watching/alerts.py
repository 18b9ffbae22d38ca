"""Alerts: which figures are worth a sentence, and what to do about them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from headwise.watching.records import Record
from headwise.watching.remedies import REMEDIES


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

    A figure that is NaN or infinite raises `not_finite` and no other alert, whatever the limits.

    Attributes:
        entropy_share: entropy collapse, where a head's mean entropy falls below this share of log(allowed keys), having been
            above it before: heads that a checkpoint brings along with one clear key are no collapse. An audit, which reads once,
            tells of every head below.
        max_logit: logit growth, where a head's largest logit exceeds this; 100 is the limit of QK-clip (Kimi K2).
        token_cosine: over-smoothing, where the mean cosine of the tokens that enter a layer exceeds this.
        high_frequency: rank collapse, where less than this share of the tokens' norm is not their mean: they are one vector.
        effective_rank: low rank, where the effective rank of a head's W_KᵀW_Q or W_OW_V falls below this, having been above.
        output_norm: a dead head, where a head's mean output norm is below this share of the largest of its layer, or zero.
        redundancy: redundancy, where a head's mean cosine with the other maps of its layer exceeds this.
        redundancy_entropy: maps that are nearly uniform (an entropy share above this) are alike by themselves and are no alert.
    """

    entropy_share: float | None = 0.05
    max_logit: float | None = 100.0
    token_cosine: float | None = 0.95
    high_frequency: float | None = 0.05
    effective_rank: float | None = 2.0
    output_norm: float | None = 0.005
    redundancy: float | None = 0.95
    redundancy_entropy: float = 0.9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"Thresholds.{field.name} must be a positive number or None, got {value!r}")


class _Found(NamedTuple):
    alert: str
    record: Record
    threshold: float
    ill: bool
    # What is so, with room for the place, the value and, where a change is told, its verb.
    says: str
    # How a figure that was healthy before came here; one that was not "is" here.
    verb: str = "is"
    # Whether a figure that was never healthy is told of too.
    at_once: bool = True


class Judge:
    """Turns the records of one reading into alerts: once when a figure passes its limit, and again only after it recovered.

    Args:
        thresholds: the limits.
        at_once: judge every figure as it stands, with nothing known of before; an audit reads once.
    """

    def __init__(self, thresholds: Thresholds, at_once: bool = False) -> None:
        self.thresholds, self.at_once = thresholds, at_once
        self._healthy: dict[tuple[str, str, str, int | None], int] = {}
        self._told: set[tuple[str, str, str, int | None]] = set()

    def alerts(self, records: Iterable[Record]) -> list[Record]:
        """Give the new alerts of the records of one step."""
        given = list(records)
        by_statistic: dict[str, list[Record]] = {}
        for record in given:
            # No limit is passed by NaN: what it raises is an alert of its own.
            if math.isfinite(record["value"]):
                by_statistic.setdefault(record["statistic"], []).append(record)
        found = [
            *_not_finite(given),
            *self._limits(by_statistic),
            *self._dead(by_statistic),
            *self._redundant(by_statistic),
        ]
        return [alert for one in found if (alert := self._told_of(one)) is not None]

    def _told_of(self, found: _Found) -> Record | None:
        record = found.record
        # Figures of one kind are told of one by one; of a head that diverged all are not finite, which is told once.
        statistic = "" if found.alert == "not_finite" else record["statistic"]
        key = (found.alert, statistic, record["site"], record["head"])
        if not found.ill:
            self._healthy[key] = record["step"]
            self._told.discard(key)
            return None
        since = self._healthy.get(key)
        if key in self._told or (since is None and not found.at_once and not self.at_once):
            return None
        self._told.add(key)
        when = "" if since is None else f" in {record['step'] - since} steps"
        place = record["site"] + ("" if record["head"] is None else f" head {record['head']}")
        remedy = REMEDIES[found.alert]
        verb, to = ("is", "") if since is None else (found.verb, "to ")
        return {
            "alert": found.alert,
            **{name: record[name] for name in ("site", "depth", "head", "step", "statistic", "value")},
            "threshold": found.threshold,
            "sentence": found.says.format(place=place, value=record["value"], verb=verb, to=to) + when,
            "remedy": remedy.text,
            "source": remedy.source,
        }

    def _limits(self, records: dict[str, list[Record]]) -> Iterable[_Found]:
        limits = self.thresholds
        if (limit := limits.entropy_share) is not None:
            text = f"entropy of {{place}} {{verb}} below {100 * limit:.3g} % of its range ({{to}}{{value:.3g}})"
            for record in records.get("entropy_share", ()):
                yield _Found("entropy_collapse", record, limit, record["value"] < limit, text, "fell", at_once=False)
        if (limit := limits.max_logit) is not None:
            text = f"the largest logit of {{place}} {{verb}} above {limit:g} ({{to}}{{value:.4g}})"
            for record in records.get("max_logit", ()):
                yield _Found("logit_growth", record, limit, record["value"] > limit, text, "rose")
        if (limit := limits.token_cosine) is not None:
            text = f"tokens that enter {{place}} are alike: mean cosine {{value:.3f}}, above {limit:g}"
            for record in records.get("token_cosine", ()):
                yield _Found("over_smoothing", record, limit, record["value"] > limit, text)
        if (limit := limits.high_frequency) is not None:
            text = f"tokens that enter {{place}} are nearly one vector: {{value:.2%}} of their norm is not their mean, below {limit:.3%}"
            for record in records.get("high_frequency", ()):
                yield _Found("rank_collapse", record, limit, record["value"] < limit, text)
        if (limit := limits.effective_rank) is not None:
            for name, product in (("effective_rank_qk", "W_KᵀW_Q"), ("effective_rank_vo", "W_OW_V")):
                text = f"effective rank of {product} of {{place}} {{verb}} below {limit:g} ({{to}}{{value:.3g}})"
                for record in records.get(name, ()):
                    yield _Found("low_rank", record, limit, record["value"] < limit, text, "fell", at_once=False)

    def _dead(self, records: dict[str, list[Record]]) -> Iterable[_Found]:
        limit = self.thresholds.output_norm
        layers: dict[str, list[Record]] = {}
        for record in records.get("output_norm", ()) if limit is not None else ():
            layers.setdefault(record["site"], []).append(record)
        for heads in layers.values():
            # The largest: where most heads of a layer are dead, its median is that of dead heads.
            largest = max(record["value"] for record in heads)
            for record in heads:
                value = record["value"]
                text = f"{{place}} says next to nothing: its mean output norm {{value:.3g}} is below {limit:.3g} of its layer's largest, {largest:.3g}"
                text = "{place} says nothing: its outputs are zero" if value == 0 else text
                yield _Found("dead_head", record, limit * largest, value == 0 or value < limit * largest, text)

    def _redundant(self, records: dict[str, list[Record]]) -> Iterable[_Found]:
        limit = self.thresholds.redundancy
        if limit is None:
            return
        shares = {(r["site"], r["head"]): r["value"] for r in records.get("entropy_share", ())}
        text = f"{{place}} attends like the other heads of its layer: mean cosine {{value:.3f}}, above {limit:g}"
        for record in records.get("head_redundancy", ()):
            uniform = shares.get((record["site"], record["head"]), 0.0) > self.thresholds.redundancy_entropy
            yield _Found("redundancy", record, limit, record["value"] > limit and not uniform, text)


def _not_finite(records: list[Record]) -> Iterable[_Found]:
    """Find, for each head and layer, whether a figure of it is not finite; the first such figure stands for all."""
    places: dict[tuple[str, int | None], Record] = {}
    for record in records:
        place = (record["site"], record["head"])
        if place not in places or (math.isfinite(places[place]["value"]) and not math.isfinite(record["value"])):
            places[place] = record
    for record in places.values():
        words = record["statistic"].replace("_", " ")
        text = f"{words} of {{place}} is {{value}}: the training diverged there"
        yield _Found("not_finite", record, math.inf, not math.isfinite(record["value"]), text)
