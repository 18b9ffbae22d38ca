"""The text of a chart of rows: labels in a column on its left and numbers on its right, never over its marks."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

# width in pixels of a chart's box below which labels are narrow and numbers short
NARROW = 500
# most letters and lines of a label, where there is room and where there is not
WIDE_LABEL, NARROW_LABEL = (34, 2), (20, 3)


def label_column(alt: Any, names: Mapping[str, str], *, small: bool = False) -> Any:
    """Return an axis of labels in lines, narrow in a narrow box and in a small chart; `names` are short forms."""
    wide, narrow = (
        {label: lines_of(label, names.get(label) or label, *room) for label in names}
        for room in (NARROW_LABEL if small else WIDE_LABEL, NARROW_LABEL)
    )
    return text_column(alt, wide, narrow, small=small, orient="left")


def text_column(
    alt: Any, wide: Mapping[str, Any], narrow: Mapping[str, Any], *, small: bool = False, **look: Any
) -> Any:
    """Return an axis whose labels are texts by value, which depend on the width of the chart's box."""
    narrow_or = functools.partial("containerSize()[0] < {} ? {} : {}".format, NARROW)
    choose = f"({narrow_or(json.dumps(narrow), json.dumps(wide))})[datum.value]"
    size, height = (10.5, 11) if small else (11.5, 12.5)
    sizes = {"labelFontSize": {"expr": narrow_or(10.5, size)}, "labelLineHeight": {"expr": narrow_or(11, height)}}
    plain = {"domain": False, "ticks": False, "grid": False, "labelLimit": 0, "labelPadding": 10}
    return alt.Axis(labelExpr=choose, labelColor="var(--ink)", **sizes, **plain, **look)


def lines_of(label: str, brief: str, letters: int, lines: int) -> list[str]:
    """Return a label in lines of at most so many letters, broken before settings and signs; else its short form."""
    for text in (label, brief):
        broken = _broken(text, letters)
        if len(broken) <= lines and max(map(len, broken)) <= letters:
            return broken
    cut = [line if len(line) <= letters else f"{line[: letters - 1]}…" for line in broken]
    return cut if len(cut) <= lines else [*cut[: lines - 1], f"{cut[lines - 1][: letters - 1].rstrip()}…"]


def _broken(text: str, letters: int) -> list[str]:
    found = [""]
    for part in re.split(r"(?<=\s)|(?=\((?!\)))", text):
        # a value parts from its setting only where both do not fit on a line
        for piece in [part] if len(part.rstrip()) <= letters else re.split("(?<==)", part):
            if found[-1] and len(found[-1] + piece.rstrip()) > letters:
                found.append("")
            found[-1] += piece
    return [line.strip() for line in found if line.strip()] or [text]
