"""Balances: whether the norms that weight decay makes equal are equal in a checkpoint, over all of its heads."""

from __future__ import annotations

import math
from collections.abc import Iterable

from typing_extensions import TypedDict

from headwise.auditing.records import BalanceRecord
from headwise.statistics.weights.balance import balance
from headwise.statistics.weights.product import Product

# a mean difference up to this share of the mean counts as nearly identical
NEARLY = 0.05
# what is compared with what, per product
ROWS = {"qk": ("row norm of W_Q", "row norm of W_K"), "vo": ("column norm of W_O", "row norm of W_V")}
NORMS = ("½(‖A‖² + ‖B‖²)", "nuclear norm of the product")


class Compared(TypedDict):
    """Two kinds of norms over all heads: pairs of them, and how far they are from equal."""

    product: str
    first: str
    second: str
    pairs: list[tuple[float, float]]
    # mean difference over mean
    deviation: float
    # Pearson's; not a number where one kind does not vary
    correlation: float
    verdict: str


def balances_of(product: Product) -> list[BalanceRecord]:
    """Read the balance of a product, group by group."""
    found = balance(product)
    parts = (found.own.tolist(), found.shared.tolist(), found.frobenius.tolist(), found.nuclear.tolist())
    return [
        {"own": own, "shared": shared, "frobenius": frobenius, "nuclear": nuclear}
        for own, shared, frobenius, nuclear in zip(*parts, strict=True)
    ]


def compared(balances: dict[str, BalanceRecord]) -> list[Compared]:
    """Compare, for queries and keys and for output and values, the norms of rows, and Frobenius with nuclear norms."""
    found = []
    for kind, rows in ROWS.items():
        of_kind = [one for place, one in balances.items() if place.rpartition("|")[2] == kind]
        if not of_kind:
            continue
        found.append(_compared(kind, rows, (pair for one in of_kind for pair in zip(one["own"], one["shared"]))))
        found.append(_compared(kind, NORMS, ((one["frobenius"], one["nuclear"]) for one in of_kind)))
    return found


def _compared(kind: str, names: tuple[str, str], pairs: Iterable[tuple[float, float]]) -> Compared:
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    away = _deviation(known)
    return {
        "product": kind,
        "first": names[0],
        "second": names[1],
        "pairs": known,
        "deviation": away,
        "correlation": _correlation(known),
        "verdict": _verdict(away),
    }


def _verdict(away: float) -> str:
    if math.isnan(away):
        return "cannot be told"
    return "nearly identical" if away <= NEARLY else "not identical"


def _deviation(pairs: list[tuple[float, float]]) -> float:
    size = math.fsum(x + y for x, y in pairs) / 2
    return math.fsum(abs(x - y) for x, y in pairs) / size if size else math.nan


def _correlation(pairs: list[tuple[float, float]]) -> float:
    count = len(pairs)
    means = [math.fsum(pair[at] for pair in pairs) / count for at in (0, 1)] if count else []
    spreads = [math.fsum((pair[at] - means[at]) ** 2 for pair in pairs) for at in (0, 1)] if count else [0.0, 0.0]
    if not all(spreads):
        return math.nan
    together = math.fsum((x - means[0]) * (y - means[1]) for x, y in pairs)
    return together / math.sqrt(spreads[0] * spreads[1])
