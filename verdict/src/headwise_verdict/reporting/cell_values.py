"""The values of a table's cells, read strictly: figures, seeds, and cells without a figure."""

from __future__ import annotations

import math
import re
from typing import Any

# the numbers of CSV and JSON; Python also reads 1_0 as 10, and the digits of other scripts
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
# 3 as pandas writes it in a column that lacks a value
WHOLE = re.compile(r"([+-]?\d+)(\.0*)?", re.ASCII)
# texts that replace a figure that a run lacks
INFINITE = ("inf", "+inf", "-inf", "infinity", "+infinity", "-infinity")
MISSING = ("", "nan", "none", "null", "na", "n/a", "<na>", *INFINITE)
# every whole number below this is a float exactly
EXACT = 2**53
# digits of the longest seed that Python converts at once
LONGEST = 4000


def figure_of(value: Any) -> float | None:
    """Return the finite number that a cell holds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not NUMBER.fullmatch(value.strip()):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_missing(value: Any) -> bool:
    """Return whether a cell holds no figure, as one of a run that did not record it."""
    return value is None or (not isinstance(value, bool) and str(value).strip().lower() in MISSING)


def seed_of(value: Any) -> int | None:
    """Return the whole number of any size that a cell holds, or None; a rounded one, as 1.8e19, is None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    text = str(value).strip()
    if match := WHOLE.fullmatch(text):
        # a float of Python that is this long was rounded
        is_float = isinstance(value, float) and abs(value) >= EXACT
        return None if is_float or len(match[1]) > LONGEST else int(match[1])
    number = figure_of(value)
    return int(number) if number is not None and number == int(number) and abs(number) < EXACT else None


def same_value(one: Any, other: Any) -> bool:
    """Return whether two cells hold the same setting: 0.1 and "0.10" do."""
    for read in (seed_of, figure_of):
        numbers = read(one), read(other)
        if None not in numbers:
            return numbers[0] == numbers[1]
    return ("" if one is None else str(one)) == ("" if other is None else str(other))
