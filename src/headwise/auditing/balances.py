"""Comparison, over all heads of a checkpoint, of the norms that weight decay makes equal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from typing_extensions import TypedDict

from headwise.auditing.records import BalanceRecord
from headwise.statistics.weights.balance import balance
from headwise.statistics.weights.product import Product

# a mean difference up to this share of the mean counts as nearly identical
NEARLY = 0.05
# the two kinds of norms that are compared, per product
ROWS = {"qk": ("row norm of W_Q", "row norm of W_K"), "vo": ("column norm of W_O", "row norm of W_V")}
NORMS = ("½(‖A‖² + ‖B‖²)", "nuclear norm of the product")


class Compared(TypedDict):
    """A comparison of two kinds of norms over all heads: the pairs, and how far they are from equal."""

    product: str
    first: str
    second: str
    pairs: list[tuple[float, float]]
    # mean difference over mean
    deviation: float
    # Pearson's; NaN if one kind does not vary
    correlation: float
    verdict: str


def balances_of(product: Product) -> list[BalanceRecord]:
    """Return the balance of a product for each group of heads."""
    norms = balance(product)
    parts = (norms.own.tolist(), norms.shared.tolist(), norms.frobenius.tolist(), norms.nuclear.tolist())
    return [
        {"own": own, "shared": shared, "frobenius": frobenius, "nuclear": nuclear}
        for own, shared, frobenius, nuclear in zip(*parts, strict=True)
    ]


def compared(balances: dict[str, BalanceRecord]) -> list[Compared]:
    """Return for both products the comparisons of row norms with row norms and of Frobenius with nuclear norms."""
    comparisons = []
    for kind, rows in ROWS.items():
        of_kind = [record for place, record in balances.items() if place.rpartition("|")[2] == kind]
        if not of_kind:
            continue
        row_norms = (pair for record in of_kind for pair in zip(record["own"], record["shared"]))
        comparisons.append(_compare(kind, rows, row_norms))
        comparisons.append(_compare(kind, NORMS, ((record["frobenius"], record["nuclear"]) for record in of_kind)))
    return comparisons


def _compare(kind: str, names: tuple[str, str], pairs: Iterable[tuple[float, float]]) -> Compared:
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    deviation = _deviation(finite)
    return {
        "product": kind,
        "first": names[0],
        "second": names[1],
        "pairs": finite,
        "deviation": deviation,
        "correlation": _correlation(finite),
        "verdict": _verdict(deviation),
    }


def _verdict(deviation: float) -> str:
    if math.isnan(deviation):
        return "cannot be told"
    return "nearly identical" if deviation <= NEARLY else "not identical"


def _deviation(pairs: list[tuple[float, float]]) -> float:
    size = math.fsum(x + y for x, y in pairs) / 2
    return math.fsum(abs(x - y) for x, y in pairs) / size if size else math.nan


def _correlation(pairs: list[tuple[float, float]]) -> float:
    count = len(pairs)
    means = [math.fsum(pair[side] for pair in pairs) / count for side in (0, 1)] if count else []
    spreads = [math.fsum((pair[side] - means[side]) ** 2 for pair in pairs) for side in (0, 1)] if count else [0.0, 0.0]
    if not all(spreads):
        return math.nan
    covariance = math.fsum((x - means[0]) * (y - means[1]) for x, y in pairs)
    return covariance / math.sqrt(spreads[0] * spreads[1])
