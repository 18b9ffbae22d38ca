"""The alerts of an audit as a reader meets them: by head, one sentence each, and one remedy for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwise.health.auditing.records import AuditAlert, WorstHead, place_of
from headwise.health.auditing.result import AuditResult
from headwise.health.statistics.alert_remedies import HARMLESS

# the names of alerts, where a reader meets them
TITLES = {
    "not_finite": "Not finite",
    "rank_collapse": "Rank collapse",
    "low_rank": "Low rank",
    "low_rank_by_decay": "Low rank by weight decay",
    "dead_head": "Dead head",
    "logit_growth": "Large logits",
    "over_smoothing": "Over-smoothing",
    "redundancy": "Redundant head",
    "sharp_head": "Sharp head",
}


class Place(NamedTuple):
    """The alerts of one head, layer or group, in sentences that begin with the name of the alert."""

    name: str
    sentences: list[str]


class Kind(NamedTuple):
    """What to do about one kind of alert: its title, the number of alerts, the remedy and its source."""

    title: str
    alerts: int
    remedy: str
    source: str


def serious(alerts: Sequence[AuditAlert]) -> list[AuditAlert]:
    """Return the alerts that ask for an action."""
    return [alert for alert in alerts if alert["alert"] not in HARMLESS]


def harmless(alerts: Sequence[AuditAlert]) -> list[AuditAlert]:
    """Return the alerts that describe a head and need no action."""
    return [alert for alert in alerts if alert["alert"] in HARMLESS]


def places(audit: AuditResult, alerts: Sequence[AuditAlert]) -> list[Place]:
    """Return the alerts by place, the worst head first, then layers in their order."""
    by_place: dict[str, list[AuditAlert]] = {}
    for alert in alerts:
        by_place.setdefault(place_of(alert), []).append(alert)
    scores = {place_of(head): head["score"] for head in audit.worst(len(audit.records))}
    ranked = sorted(by_place, key=lambda name: -scores.get(name, 0.0))
    return [Place(short_place(by_place[name][0], audit), _sentences(by_place[name])) for name in ranked]


def kinds(alerts: Sequence[AuditAlert]) -> list[Kind]:
    """Return what to do about each kind of alert, in the order of the alerts."""
    by_kind: dict[tuple[str, str], list[AuditAlert]] = {}
    for alert in alerts:
        by_kind.setdefault((alert["alert"], alert["remedy"]), []).append(alert)
    return [
        Kind(_title(ones[0]), len(ones), f"{capital(remedy)}.", ones[0]["source"])
        for (_, remedy), ones in by_kind.items()
    ]


def short_place(alert: AuditAlert | WorstHead, audit: AuditResult) -> str:
    """Return a place by its depth, "Layer 3 head 1", if depths are unique; else by its name."""
    depths = [layer["depth"] for layer in audit.layers]
    if alert["depth"] is None or len(set(depths)) < len(depths):
        return place_of(alert)
    return place_of(alert, f"Layer {alert['depth']}")


def sentence(alert: AuditAlert) -> str:
    """Return the sentence of an alert below the name of its place, which it need not repeat."""
    return f"{capital(_without_place(alert['sentence'], alert))}."


def reason_of(head: WorstHead) -> str:
    """Return the reasons of a head's score in one phrase, which need not repeat its place."""
    reasons = "; ".join(_without_place(one, head) for one in head["reasons"])
    return capital(reasons)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def capital(text: str) -> str:
    """Return a text that begins with a capital letter; a name of Python at its start stays as it is."""
    first = text.split(" ", 1)[0]
    return text if any(sign in first for sign in "._(") else text[:1].upper() + text[1:]


def _sentences(alerts: Sequence[AuditAlert]) -> list[str]:
    return [f"{_title(alert)}: {sentence(alert)}" for alert in alerts]


def _without_place(text: str, at: AuditAlert | WorstHead) -> str:
    """Return a text with "the head" or "the layer" where it names the place of a head or layer."""
    place, subject = place_of(at), "the layer" if at["head"] is None else "the head"
    return text.replace(f" of {place}", "").replace(place, subject)


def _title(alert: AuditAlert) -> str:
    name = alert["alert"]
    # an alert on data has a step; large weights need not make large logits
    if name == "logit_growth" and "step" not in alert:
        return "Large query-key weights"
    return TITLES.get(name, capital(name))
