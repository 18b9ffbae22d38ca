"""Formats of numbers (percent, differences, intervals, p-values, times, bytes), and plain tables for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

MINUS = "−"


@dataclass(frozen=True)
class Unit:
    """The format of a metric: its factor, its unit, the unit of differences, and its decimals."""

    factor: float
    name: str
    difference: str
    decimals: int

    def number(self, value: float | None, *, signed: bool = False) -> str | None:
        """Return the value as text, or None without a value; a zero has no sign."""
        if value is None:
            return None
        text = f"{_exact(value * self.factor, self.decimals):{'+' if signed else ''},.{self.decimals}f}"
        if float(text.replace(",", "")) == 0:
            text = text.lstrip("+-")
        return text.replace("-", MINUS)

    def interval(self, low: float | None, high: float | None, *, signed: bool = False) -> str:
        """Return "[low, high]", or an empty string without an interval."""
        if low is None or high is None:
            return ""
        return f"[{self.number(low, signed=signed)}, {self.number(high, signed=signed)}]"


def _exact(value: float, decimals: int) -> Decimal | float:
    """Return a number rounded half away from zero, in the digits that are no rounding errors of the sums before.

    One mean, computed in two ways, would else be 28.864999999999995 and 28.865000000000002, shown as 28.86 and 28.87.
    """
    if not abs(value) < 1e15:
        return value
    return Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)


def unit_named(unit: str) -> Unit:
    """Return the format of a unit, with differences of percents in points.

    "%" is a share in [0, 1], shown as percent; "percent" is one already.
    """
    factors = {"%": 100, "percent": 1}
    return Unit(factors[unit], "%", "points", 2) if unit in factors else Unit(1, unit, unit, 4)


def p_value(p: float | None) -> str | None:
    """Return a p-value as text with two significant digits."""
    if p is None:
        return None
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.095 else f"{p:.2f}"


def milliseconds(seconds: float | None) -> str | None:
    """Return seconds as text in milliseconds with three significant digits."""
    return None if seconds is None else f"{_three(seconds * 1000)} ms"


def mebibytes(number: float | None) -> str | None:
    """Return bytes as text in MiB with three significant digits."""
    return None if number is None else f"{_three(number / 2**20)} MiB"


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
