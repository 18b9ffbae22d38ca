"""Alerts about unhealthy heads and layers, and the judge that raises them by applying the rules of `rules.py`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from headwise.files.html import html_table
from headwise.health.health_records import Alert, Record
from headwise.health.statistics.alert_remedies import remedy_for
from headwise.health.watching.diagnosis import Incidents, told
from headwise.health.watching.rules import RULES, ByStatistic, Finding, Rule
from headwise.health.watching.rules import Thresholds as Thresholds

# A copy of the alarms.json that the study of the alarms writes; absent until its results are published.
FILE = "measured_alarms.json"
UNKNOWN = "Not measured: how early this alarm is, and how often it is wrong."


@cache
def measured() -> dict[str, Any]:
    """Return the measured quality of each alarm, by name; empty without the results of the study."""
    file = files("headwise.health.watching").joinpath(FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def in_words(alert: str) -> str:
    """Return how many faults the alarm caught in the study of the alarms, how early, and how often it was wrong.

    The words are `UNKNOWN` for an alert that was not measured.
    """
    quality = measured().get(alert)
    if not quality or not quality["healthy_steps"]:
        return UNKNOWN
    false, steps = quality["false_alarms"], quality["healthy_steps"]
    wrong = f"{false or 'no'} false alarm{'s' if false != 1 else ''} in {steps:,} healthy steps"
    lead = "" if quality["lead"] is None else f", typically {_early(round(quality['lead']))}"
    return f"In tests: caught {quality['caught'] or 'none'} of {quality['faults']} faults{lead}; {wrong}."


def _early(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''} early" if steps else "as the loss showed them"


class HealthWarning(UserWarning):
    """Warning about an unhealthy head or layer, or about a watch that cannot read as requested."""


class HealthAlert(RuntimeError):
    """Error that stops the training because of an unhealthy head or layer; raised with `on_alert="raise"` only."""

    def __init__(self, alerts: list[Alert]) -> None:
        super().__init__(told(Incidents().add(alerts)))
        self.alerts = alerts


class Alerts(list[Alert]):
    """List of alerts that a notebook displays as a table."""

    def _repr_html_(self) -> str:
        rows = [(a["step"], a["alert"], a["sentence"], a["remedy"], a["source"], a["measured"]) for a in self]
        title = f"{len(self)} alert{'s' if len(self) != 1 else ''}"
        return html_table(
            title, ("step", "alert", "what it says", "what to do", "who showed it", "how good the alarm is"), rows
        )


class Judge:
    """Judge that turns the records of a reading into alerts.

    A figure that passes its limit raises one alert, and another one only after it has recovered.

    Args:
        at_once: judge every figure without any history, as an audit does, which reads once.
    """

    def __init__(self, thresholds: Thresholds, at_once: bool = False, rules: tuple[type[Rule], ...] = RULES) -> None:
        self.rules = [rule(thresholds) for rule in rules if rule.in_audits or not at_once]
        self.at_once = at_once
        # Keys are alert, statistic, site and head: the last healthy step of each figure, and the figures that are
        # unhealthy and have been reported.
        self._healthy: dict[tuple[str, str, str, int | None], int] = {}
        self._reported: set[tuple[str, str, str, int | None]] = set()

    def ill(self) -> dict[str, int]:
        """Return the number of figures that are beyond their limit and were told, by alert."""
        return dict(Counter(alert for alert, *_ in self._reported))

    def alerts(self, records: Iterable[Record]) -> list[Alert]:
        """Return the new alerts of the records of one step."""
        records = list(records)
        finite: ByStatistic = {}
        for record in records:
            if math.isfinite(record["value"]):
                finite.setdefault(record["statistic"], []).append(record)
        # All rules run before any alert is made, so that no alert depends on the order of the rules.
        findings = [(rule, finding) for rule in self.rules for finding in rule.findings(finite, records)]
        return [alert for rule, finding in findings for alert in self._new_alerts(rule, finding, finite)]

    def _new_alerts(self, rule: Rule, finding: Finding, finite: ByStatistic) -> Iterator[Alert]:
        """Return the alert of an unhealthy finding; nothing if it is already reported or needs a healthy step first."""
        record = finding.record
        key = (rule.alert, record["statistic"] if rule.per_statistic else "", record["site"], record["head"])
        if not finding.ill:
            self._healthy[key] = record["step"]
            self._reported.discard(key)
            return
        since = self._healthy.get(key)
        if key in self._reported or (since is None and not rule.at_once and not self.at_once):
            return
        self._reported.add(key)
        name = (self.at_once and rule.of_checkpoint) or rule.alert
        remedy = remedy_for(name, trains=not self.at_once)
        alert: Alert = {
            "alert": name,
            "site": record["site"],
            "depth": record["depth"],
            "head": record["head"],
            "step": record["step"],
            "statistic": record["statistic"],
            "value": record["value"],
            "threshold": finding.threshold,
            "sentence": _sentence(rule, finding, since) + (rule.adds(record, finite) if self.at_once else ""),
            "remedy": remedy.text,
            "source": remedy.source,
            "measured": "" if self.at_once else in_words(rule.alert),
        }
        if since is not None:
            alert["since"] = since
        yield alert


def _sentence(rule: Rule, finding: Finding, since: int | None) -> str:
    record = finding.record
    when = ""
    if since is not None and rule.says_since:
        steps = record["step"] - since
        when = f" within {steps} step{'s' if steps != 1 else ''}"
    place = record["site"] + ("" if record["head"] is None else f" head {record['head']}")
    verb, now = (rule.state, "") if since is None else (rule.verb, "now ")
    numbers = {"value": record["value"], "limit": finding.threshold, "percent": 100 * finding.threshold}
    return finding.says.format(place=place, verb=verb, now=now, **numbers) + when
