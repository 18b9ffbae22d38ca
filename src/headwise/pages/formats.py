"""Turn numbers into the text of a report: percent, signed differences, intervals, p-values, times, bytes."""

from __future__ import annotations

from dataclasses import dataclass

MINUS = "−"


@dataclass(frozen=True)
class Unit:
    """Says how a metric is shown: its factor, its unit, that of a difference, and its decimals."""

    factor: float
    name: str
    difference: str
    decimals: int

    def number(self, value: float | None, *, signed: bool = False) -> str | None:
        """Return the value as text, or None when there is none; a signed zero has no sign."""
        if value is None:
            return None
        text = f"{value * self.factor:{'+' if signed else ''},.{self.decimals}f}"
        if float(text.replace(",", "")) == 0:
            text = text.lstrip("+-")
        return text.replace("-", MINUS)

    def interval(self, low: float | None, high: float | None, *, signed: bool = False) -> str:
        """Return "[low, high]", or nothing when there is no interval."""
        if low is None or high is None:
            return ""
        return f"[{self.number(low, signed=signed)}, {self.number(high, signed=signed)}]"


def unit_named(unit: str) -> Unit:
    """Return how figures of a unit are shown: "%" is a share in [0, 1], shown as percent, whose differences are
    points."""
    return Unit(100, "%", "points", 2) if unit == "%" else Unit(1, unit, unit, 4)


def p_value(p: float | None) -> str | None:
    """Return a p-value with two digits that matter."""
    if p is None:
        return None
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.095 else f"{p:.2f}"


def milliseconds(seconds: float | None) -> str | None:
    """Return seconds as milliseconds, three digits that matter."""
    return None if seconds is None else f"{_three(seconds * 1000)} ms"


def mebibytes(number: float | None) -> str | None:
    """Return bytes as MiB, three digits that matter."""
    return None if number is None else f"{_three(number / 2**20)} MiB"


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
