"""The rules of `watch` on figures that a log already holds: which can be applied, and the alerts that they raise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headwise.health.health_records import Alert, Record
from headwise.health.watching.alerts import Judge
from headwise.health.watching.diagnosis import Incidents
from headwise.health.watching.losses import BEFORE, LOSS_SPIKE, LOSS_WAVES, WHOLE, LossFigures
from headwise.health.watching.rules import OF_STEPS, RULES, NotFinite, Rule, Thresholds
from headwise.health.watching.weights import OUTSIDE

LOSS, GRADIENT = "loss", "gradient_norm"
OF_LOSS = {LOSS_SPIKE, LOSS_WAVES}
# What a user can map columns to.
JUDGED = (LOSS, GRADIENT, *dict.fromkeys(name for rule in RULES for name in rule.reads))
# The names by which headwise logs a figure.
OWN = re.compile(r"health/(?P<statistic>\w+)/(?P<site>.+?)(/head(?P<head>\d+))?")
# Steps and values of one column.
Series = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Applied:
    """Whether a rule could be applied to a log.

    Attributes:
        rule: the name of its alert.
        columns: the columns that it judged; empty if it could not be applied.
        values: the number of figures that it judged.
        why: why it could not be applied, or a caution.
    """

    rule: str
    columns: tuple[str, ...]
    values: int
    why: str = ""

    def __str__(self) -> str:
        if not self.columns:
            return f"{self.rule}: not applied, {self.why}"
        names = ", ".join(self.columns[:3]) + (f" and {len(self.columns) - 3} more" if len(self.columns) > 3 else "")
        return f"{self.rule}: {self.values} values of {names}" + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True)
class LoggedRun:
    """What the rules say of one run of a log; print it.

    Attributes:
        run: its name; empty for the only run.
        first, last: its first and last step.
        rules: which rules could be applied, and why others could not.
        alerts: the alerts in the order of their steps.
    """

    run: str
    first: int
    last: int
    rules: tuple[Applied, ...]
    alerts: tuple[Alert, ...]

    def __str__(self) -> str:
        incidents = Incidents(_distance(sorted({alert["step"] for alert in self.alerts})))
        for step in dict.fromkeys(alert["step"] for alert in self.alerts):
            incidents.add([alert for alert in self.alerts if alert["step"] == step])
        name = f"{self.run}, steps" if self.run else "Steps"
        said = [f"{name} {self.first:,} to {self.last:,}: {_number(len(self.alerts))}.", *map(str, incidents.all)]
        return "\n".join(said + ["Rules:", *(f"  {rule}" for rule in self.rules)])


def judged(run: str, columns: Mapping[str, Mapping[str, Series]], thresholds: Thresholds | None = None) -> LoggedRun:
    """Return what the rules say of one run.

    Args:
        columns: for each of `JUDGED` that is logged, its columns with their steps and values.
    """
    limits = thresholds or Thresholds()
    records = [_record(statistic, column, step, value) for statistic, column, step, value in _figures(columns)]
    of_losses = []
    for series in columns.get(LOSS, {}).values():
        figures = LossFigures()
        of_losses += [record for step, value in series for record in figures.next(step, value)]
    alerts = [*_alerts(Judge(limits), records), *_alerts(Judge(limits, rules=OF_STEPS), of_losses)]
    steps = [step for own in columns.values() for series in own.values() for step, _ in series]
    rules = tuple(_applied(rule, columns, limits) for rule in dict.fromkeys((*RULES, *OF_STEPS)))
    ordered = tuple(sorted(alerts, key=lambda alert: alert["step"]))
    return LoggedRun(run, min(steps, default=0), max(steps, default=0), rules, ordered)


def _alerts(judge: Judge, records: list[Record]) -> list[Alert]:
    by_step: dict[int, list[Record]] = {}
    for record in records:
        by_step.setdefault(record["step"], []).append(record)
    return [alert for step in sorted(by_step) for alert in judge.alerts(by_step[step])]


def _figures(columns: Mapping[str, Mapping[str, Series]]) -> list[tuple[str, str, int, float]]:
    return [
        (statistic, column, step, value)
        for statistic, own in columns.items()
        if statistic != LOSS
        for column, series in own.items()
        for step, value in series
    ]


def _record(statistic: str, column: str, step: int, value: float) -> Record:
    own = OWN.fullmatch(column)
    site, head = (own["site"], own["head"]) if own else (column, None)
    site = "all heads" if site in ("lowest", "highest") else WHOLE if statistic == GRADIENT else site
    number = None if head is None else int(head)
    return {"site": site, "depth": OUTSIDE, "head": number, "step": step, "statistic": statistic, "value": value}


def _applied(rule: type[Rule], columns: Mapping[str, Mapping[str, Series]], limits: Thresholds) -> Applied:
    """Return whether a rule can be applied to these columns."""
    reads = tuple(columns) if rule is NotFinite else (LOSS,) if OF_LOSS & {*rule.reads} else rule.reads
    own = {column: series for name in reads for column, series in columns.get(name, {}).items()}
    if not own:
        wanted = " or ".join(reads) or "any figure"
        return Applied(rule.alert, (), 0, f"no column holds {wanted} (--map {reads[0] if reads else LOSS}=COLUMN)")
    values, why = sum(map(len, own.values())), ""
    if rule.alert == "dead_head" and len(own) < 2:
        return Applied(rule.alert, (), 0, "one column cannot be compared with the other heads of its layer")
    if OF_LOSS & {*rule.reads}:
        longest = max(own.values(), key=len)
        distance = _distance([step for step, _ in longest])
        if len(longest) <= BEFORE:
            return Applied(rule.alert, (), 0, f"it needs {BEFORE + 1} logged losses, and there are {len(longest)}")
        if distance > 1:
            why = (
                f"each is compared with {BEFORE} values over {BEFORE * distance:,} steps; in tests every step was read"
            )
    return Applied(rule.alert, tuple(own), values, why)


def _distance(steps: Sequence[int]) -> int:
    """Return the median distance of steps, 1 without any."""
    apart = sorted(after - before for before, after in pairwise(steps))
    return max(1, apart[len(apart) // 2]) if apart else 1


def _number(count: int) -> str:
    return f"{count} alert{'s' if count > 1 else ''}" if count else "no alerts"
