"""The change of a statistic since the first reading of a head."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from headwise.health.health_records import Record
from headwise.health.watching.figures import Figures

# Each with the statistic that it is the change of. They are slow: no reading alone shows them.
DRIFTS = {
    "log_sum_exp_drift": "log_sum_exp",
    "sink_mass_growth": "sink_mass",
    "sink_weight_growth": "sink_weight",
    "gate_mean_growth": "gate_mean",
}


def with_bases(names: Iterable[str]) -> list[str]:
    """Return the names with the statistics that the changes among them are taken of, which are read and recorded."""
    return list(dict.fromkeys(part for name in names for part in (DRIFTS.get(name, name), name)))


class Drift:
    """The value of each head at its first reading, and the differences from it, for the names that are in `DRIFTS`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._bases = {DRIFTS[name]: name for name in names if name in DRIFTS}
        self._first: dict[tuple[str, str, int], float] = {}

    def know(self, records: Iterable[Record]) -> None:
        """Take the first values from the records of a run that is continued, in their order."""
        for record in records:
            if record["statistic"] in self._bases and record.get("head") is not None:
                place = record["statistic"], record["site"], int(record["head"] or 0)
                self._first.setdefault(place, record["value"])

    def explained(self, reasons: dict[str, str]) -> dict[str, str]:
        """Return the reasons for missing statistics of a site, with those for their changes."""
        return reasons | {name: reasons[base] for base, name in self._bases.items() if base in reasons}

    def of(self, figures: Iterable[Figures]) -> list[Figures]:
        """Return the changes of figures since the first of them; 0 at that one."""
        return [self._change(figure, name) for figure in figures if (name := self._bases.get(figure.statistic))]

    def _change(self, figure: Figures, name: str) -> Figures:
        values = array("d", [math.nan] * len(figure.values))
        for head, value in enumerate(figure.values):
            if head not in figure.missing:
                values[head] = value - self._first.setdefault((figure.statistic, figure.site, head), value)
        return Figures(
            figure.site, figure.depth, figure.step, name, figure.per, values, None, figure.sampled, figure.missing
        )
