"""The diagnosis of a watched training: its alerts grouped by what began, and what has followed from it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headwise.health.health_records import Alert

# Which of the kinds that show in one reading began: those before lead to those behind.
CAUSES = (
    "mask_lost",
    "sorted_batches",
    "logit_growth",
    "entropy_collapse",
    "low_rank",
    "rank_collapse",
    "over_smoothing",
    "redundancy",
    "dead_head",
    "loss_spike",
    "not_finite",
)
# What is seen, where the kind names the cause: after a loss spike, the loss goes in waves whatever the batches are.
SEEN = {"sorted_batches": "loss in waves"}
# Kinds of the whole model, which have no number of places.
OF_MODEL = ("loss_spike", "sorted_batches")
# Alerts within this many steps of one another belong together, or within two readings if these are farther apart.
TOGETHER = 50
NUMBERS = "no one two three four five six seven eight nine ten eleven twelve".split()


@dataclass
class Incident:
    """Alerts that came one after the other, as one trouble that spreads."""

    alerts: list[Alert] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of its alerts, the one that began first."""
        first: dict[str, int] = {}
        for alert in self.alerts:
            first[alert["alert"]] = min(first.get(alert["alert"], alert["step"]), alert["step"])
        return sorted(first, key=lambda kind: (first[kind], _rank(kind)))

    def of(self, kind: str) -> list[Alert]:
        """Return its alerts of a kind, the earliest first."""
        return sorted((alert for alert in self.alerts if alert["alert"] == kind), key=lambda alert: alert["step"])

    def begun(self) -> str:
        """Return what began, where, since when, what to do, and how good the alarm is, as indented lines."""
        first, *others = self.of(self.kinds[0])
        since = f" (healthy at step {first['since']})" if "since" in first else ""
        lines = [f"Step {first['step']}{since}: {first['sentence']}{_elsewhere(first, others)}"]
        lines += [f"  what to do: {first['remedy']} ({first['source']})"] if first["remedy"] else []
        return "\n".join(lines + [f"  {first['measured']}"] * bool(first["measured"]))

    def followed(self, kind: str) -> str:
        """Return a line on a kind that has followed: where, and from which step."""
        alerts = self.of(kind)
        return f"{named(kind)}{_spread(alerts)} from step {alerts[0]['step']}"

    def __str__(self) -> str:
        later = [self.followed(kind) for kind in self.kinds[1:]]
        return self.begun() + (f"\n  has followed: {'; '.join(later)}" if later else "")


class Incidents:
    """The incidents of a training, which grow by the alerts of each reading."""

    def __init__(self, every: int = 1) -> None:
        self.together = max(TOGETHER, 2 * every)
        self.all: list[Incident] = []
        self._last = 0

    def add(self, alerts: Sequence[Alert]) -> dict[str, str]:
        """Add alerts, and return one text for each kind that is new in its incident.

        A new incident is told whole; a kind that follows in a known one has a single line, and a kind that is known
        there has none.
        """
        if not alerts:
            return {}
        begins = not self.all or min(alert["step"] for alert in alerts) > self._last + self.together
        if begins:
            self.all.append(Incident())
        self._last = max(self._last if not begins else 0, *(alert["step"] for alert in alerts))
        incident = self.all[-1]
        before = incident.kinds
        incident.alerts += alerts
        news = [kind for kind in incident.kinds if kind not in before]
        if begins:
            return {news[0]: incident.begun()} | {kind: incident.followed(kind) for kind in news[1:]}
        start = f"has followed the {named(before[0])} of step {incident.of(before[0])[0]['step']}"
        return {kind: f"{incident.followed(kind)} {start}" for kind in news}


def told(news: dict[str, str]) -> str:
    """Return the texts of `Incidents.add` as one."""
    first, *others = news.values()
    return first + "".join(f"\n  with it: {line}" if "\n" in first else f"\n{line}" for line in others)


@dataclass(frozen=True)
class Diagnosis:
    """What `watch.report()` returns: print it, or display it in a notebook.

    Attributes:
        step: the number of steps so far.
        readings: the number of readings so far.
        incidents: what began and what has followed, in their order.
        now: for each kind of alert the number of heads and layers that are beyond their limit in the last reading.
        closer: sentences on the steps that were read closer, with the reason.
        details: whether to list every alert.
    """

    step: int
    readings: int
    incidents: tuple[Incident, ...]
    now: dict[str, int]
    closer: tuple[str, ...] = ()
    details: bool = False

    def __str__(self) -> str:
        alerts = [alert for incident in self.incidents for alert in incident.alerts]
        read = f"{_count(self.readings, 'reading')} in {_count(self.step, 'step')}"
        if not self.step:
            return "No step was read: call watch.step(loss) after each optimizer step."
        if not alerts:
            return "\n".join([f"No alerts: {read}.", *self.closer])
        groups = f", {_count(len(self.incidents), 'incident')}" if len(self.incidents) > 1 else ""
        lines = [f"{_count(len(alerts), 'alert')}{groups}: {read}.", *map(str, self.incidents), self._now()]
        lines += self.closer
        if not self.details:
            return "\n".join([*lines, "report(details=True) lists every alert."])
        return "\n".join(lines + [f"  step {alert['step']}: {alert['sentence']}" for alert in alerts])

    def _now(self) -> str:
        kinds = sorted(self.now, key=_rank)
        still = [named(kind) + ("" if kind in OF_MODEL else f" in {self.now[kind]}") for kind in kinds]
        return f"Beyond a limit now: {', '.join(still) or 'nothing; all have recovered'}."

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return str(self)


def named(kind: str) -> str:
    """Return a kind of alert in words."""
    return SEEN.get(kind, kind.replace("_", " "))


def _rank(kind: str) -> int:
    return CAUSES.index(kind) if kind in CAUSES else len(CAUSES)


def _elsewhere(first: Alert, others: Iterable[Alert]) -> str:
    """Return "here and in two other heads", or nothing if the first is alone."""
    places = {(alert["site"], alert["head"]) for alert in others} - {(first["site"], first["head"])}
    if not places:
        return ""
    kind = "layer" if first["head"] is None else "head"
    return f", here and in {_number(len(places))} other {kind}{'s' if len(places) > 1 else ''}"


def _spread(alerts: Sequence[Alert]) -> str:
    """Return " in 6 heads of 2 layers"; nothing for a figure of the whole model."""
    layers = {alert["site"] for alert in alerts}
    heads = {(alert["site"], alert["head"]) for alert in alerts if alert["head"] is not None}
    if heads:
        return f" in {_count(len(heads), 'head')} of {_count(len(layers), 'layer')}"
    return "" if layers == {"model"} else f" in {_count(len(layers), 'layer')}"


def _number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
