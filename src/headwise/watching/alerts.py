"""Alerts: which figures are worth a sentence, and what to do about them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from headwise.files.health_records import Alert, Record
from headwise.pages.notebook import html_table
from headwise.statistics.alert_remedies import remedy_for
from headwise.watching.rules import RULES, ByStatistic, Finding, Rule
from headwise.watching.rules import Thresholds as Thresholds

# What the study writes as alarms.json, beside this file once its results are kept.
FILE = "measured_alarms.json"
UNKNOWN = "how early and how often wrong this alarm is was not measured"
PAGE = "docs/results/alarms"


@cache
def measured() -> dict[str, Any]:
    """Return what was measured of each alarm; empty until the results of the study are kept."""
    found = files("headwise.watching").joinpath(FILE)
    return json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}


def in_words(alert: str) -> str:
    """Return the share of faults that an alert caught, its median lead and its false alarms; that it was not measured,
    else."""
    found = measured().get(alert)
    if not found or not found["healthy_steps"]:
        return UNKNOWN
    rate, low, high = found["per_1000"]
    false = f"{rate:.3g} [{low:.3g}, {high:.3g}] false alarms in 1,000 healthy steps"
    caught = f"caught {found['caught']} of {found['faults']} faults"
    lead = "" if found["lead"] is None else f", {found['lead']:.0f} steps before the loss at the median"
    return f"{caught}{lead}, {false} ({PAGE})"


class HealthWarning(UserWarning):
    """Warns of the health of a head or layer."""


class HealthAlert(RuntimeError):
    """Stops a training for the health of a head or layer, where `on_alert="raise"` asks for it."""

    def __init__(self, alerts: list[Alert]) -> None:
        super().__init__("\n".join(told(alerts)))
        self.alerts = alerts


class Alerts(list[Alert]):
    """A list of alerts that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = [(a["step"], a["alert"], a["sentence"], a["remedy"], a["source"], a.get("measured", "")) for a in self]
        title = f"{len(self)} alert{'s' if len(self) != 1 else ''}"
        return html_table(
            title, ("step", "alert", "what it says", "what to do", "who showed it", "how good the alarm is"), rows
        )


def told(alerts: list[Alert]) -> list[str]:
    """Return a text per kind of alert: the first of its kind and how many more there are, then a line with the remedy
    and one with what was measured of the alarm."""
    kinds: dict[str, list[Alert]] = {}
    for alert in alerts:
        kinds.setdefault(alert["alert"], []).append(alert)
    texts = []
    for first, *others in kinds.values():
        more = f", and {len(others)} more like it" if others else ""
        measured = f"\n  how good this alarm is: {known}" if (known := first.get("measured")) else ""
        texts.append(f"{first['sentence']}{more}\n  what to do: {first['remedy']} ({first['source']}){measured}")
    return texts


class Judge:
    """Turns the records of one reading into alerts: once when a figure passes its limit, and again only after it
    recovered.

    Args:
        thresholds: the limits.
        at_once: judge every figure as it stands, with nothing known of before; an audit reads once.
        rules: what is told.
    """

    def __init__(self, thresholds: Thresholds, at_once: bool = False, rules: tuple[type[Rule], ...] = RULES) -> None:
        self.rules = [rule(thresholds) for rule in rules]
        self.at_once = at_once
        # By alert, statistic, site and head: the last step at which the figure was well, and whether its illness was
        # told.
        self._healthy: dict[tuple[str, str, str, int | None], int] = {}
        self._told: set[tuple[str, str, str, int | None]] = set()

    def alerts(self, records: Iterable[Record]) -> list[Alert]:
        """Return the new alerts of the records of one step."""
        given = list(records)
        finite: ByStatistic = {}
        for record in given:
            if math.isfinite(record["value"]):
                finite.setdefault(record["statistic"], []).append(record)
        # All alerts are found before any is reported, so that none depends on the order of the rules.
        found = [(rule, one) for rule in self.rules for one in rule.findings(finite, given)]
        return [alert for rule, one in found for alert in self._new(rule, one, finite)]

    def _new(self, rule: Rule, found: Finding, finite: ByStatistic) -> Iterator[Alert]:
        """Return the alert of a finding where it is ill, was not told of yet and is to be told."""
        record = found.record
        key = (rule.alert, record["statistic"] if rule.per_statistic else "", record["site"], record["head"])
        if not found.ill:
            self._healthy[key] = record["step"]
            self._told.discard(key)
            return
        since = self._healthy.get(key)
        if key in self._told or (since is None and not rule.at_once and not self.at_once):
            return
        self._told.add(key)
        name = (self.at_once and rule.of_checkpoint) or rule.alert
        remedy = remedy_for(name, trains=not self.at_once)
        yield {
            "alert": name,
            "site": record["site"],
            "depth": record["depth"],
            "head": record["head"],
            "step": record["step"],
            "statistic": record["statistic"],
            "value": record["value"],
            "threshold": found.threshold,
            "sentence": _sentence(rule, found, since) + (rule.adds(record, finite) if self.at_once else ""),
            "remedy": remedy.text,
            "source": remedy.source,
            "measured": "" if self.at_once else in_words(rule.alert),
        }


def _sentence(rule: Rule, found: Finding, since: int | None) -> str:
    record = found.record
    when = "" if since is None else f" in {(steps := record['step'] - since)} step{'s' if steps != 1 else ''}"
    place = record["site"] + ("" if record["head"] is None else f" head {record['head']}")
    verb, to = ("is", "") if since is None else (rule.verb, "to ")
    return found.says.format(place=place, value=record["value"], verb=verb, to=to) + when
