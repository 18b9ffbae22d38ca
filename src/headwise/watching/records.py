"""Records: what was read, kept as plain numbers until somebody asks for dicts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NotRequired, cast

from torch import Tensor

# Of typing_extensions, which torch brings: pydantic reads typing's own from Python 3.12 on.
from typing_extensions import TypedDict

from headwise.core.site import Site
from headwise.statistics import STATISTICS, Tally


class Record(TypedDict):
    """One figure of one head, of a group of heads or of a layer, at one step.

    `head` is None for a group or a layer. `low` and `high` bound the 95 % interval of a mean over sampled queries.
    """

    site: str
    depth: int
    head: int | None
    step: int
    statistic: str
    value: float
    group: NotRequired[int]
    sampled: NotRequired[bool]
    low: NotRequired[float]
    high: NotRequired[float]


class Alert(TypedDict):
    """A figure that passed its limit, what that means, what helps and who showed it."""

    alert: str
    site: str
    depth: int
    head: int | None
    step: int
    statistic: str
    value: float
    threshold: float
    sentence: str
    remedy: str
    source: str


Line = Record | Alert


@dataclass(frozen=True)
class Figures:
    """One statistic of one site at one step: a value per head, per group of heads, or one for the layer.

    `missing` names the heads of which nothing was counted, such as one that has a single key for every query.
    """

    site: str
    depth: int
    step: int
    statistic: str
    per: str
    values: array[float]
    margins: array[float] | None
    sampled: bool
    missing: frozenset[int] = frozenset()

    @classmethod
    def of(cls, site: Site, step: int, name: str, tally: Tally) -> Figures | None:
        """Turn a joined tally into numbers; None where nothing was counted."""
        statistic = STATISTICS[name]()
        counted = tally.counted()
        if not bool(counted.any()):
            return None
        # A figure of pairs of heads is one number per head of this layer.
        heads = counted.reshape(counted.shape[0], -1).any(-1).tolist()
        margin = tally.margin()
        if statistic.per == "layer" and margin is not None and margin.numel() > 1:
            # Heads read the same sampled queries: their errors add up at worst.
            margin = margin.mean(0, keepdim=True)
        values = array("d", statistic.finish(tally).double().flatten().tolist())
        margins = None if margin is None else array("d", margin.double().flatten().tolist())
        missing = frozenset(head for head, known in enumerate(heads) if not known)
        return cls(site.name, site.depth, step, name, statistic.per, values, margins, tally.sampled, missing)

    @classmethod
    def of_weights(cls, site: Site, step: int, name: str, values: Tensor, heads: int) -> Figures:
        """Keep a figure of the weights: one number per head, or per group of heads that share keys and values."""
        numbers = array("d", values.double().flatten().tolist())
        return cls(
            site.name, site.depth, step, name, "head" if len(numbers) == heads else "group", numbers, None, False
        )

    def records(self) -> Iterator[Record]:
        """Give a dict per head; a value that is not finite stays as it is, a head of which nothing was counted is left out."""
        for head, value in enumerate(self.values):
            if head in self.missing:
                continue
            record: Record = {
                "site": self.site,
                "depth": self.depth,
                "head": head if self.per == "head" else None,
                "step": self.step,
                "statistic": self.statistic,
                "value": value,
            }
            if self.per == "group":
                record["group"] = head
            if self.sampled:
                record["sampled"] = True
            if self.margins is not None and math.isfinite(self.margins[head]):
                record["low"], record["high"] = value - self.margins[head], value + self.margins[head]
            yield record


def alerts_among(lines: Iterable[Line]) -> list[Alert]:
    """Give the alerts among what a log takes."""
    return [cast(Alert, line) for line in lines if "alert" in line]


def figures_among(lines: Iterable[Line]) -> list[Record]:
    """Give the figures among what a log takes."""
    # A checker does not tell the two by a field that one of them has not.
    return [cast(Record, line) for line in lines if "alert" not in line]


def flat(lines: Iterable[Line]) -> dict[str, float]:
    """Give figures as one flat dict for loggers of metrics: health/<statistic>/<site>/<head> to value."""
    named = {}
    for record in figures_among(lines):
        place = "" if record["head"] is None else f"/head{record['head']}"
        place = f"/group{record['group']}" if "group" in record else place
        named[f"health/{record['statistic']}/{record['site']}{place}"] = record["value"]
    return named
