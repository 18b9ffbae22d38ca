"""The forest plot in SVG of a source's claims: effects as multiples of the published ones, others in panels of their
own."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from claims_placed import Placed

from headwise_verdict.results.analysis_record import HELD, JudgedTest

WIDTH, ROW, HEAD, FOOT, LEFT, RIGHT = 880, 42, 44, 30, 10, 150
COLOURS = {"held": "#0072b2", "against": "#c04d00", "open": "#7b828c"}
SIGNS = {"higher": 1, "rises": 1, "inside": 1, "lower": -1, "falls": -1}


class Row(NamedTuple):
    """One row of the plot: a claim's line, study, effect with interval in the panel's unit, and verdict."""

    line: str
    study: str
    mean: float
    low: float
    high: float
    verdict: str


class Panel(NamedTuple):
    """One panel: the title of its axis, its reference lines with labels, and the range of its axis."""

    title: str
    lines: tuple[tuple[float, str], ...]
    reach: tuple[float, float]


PANELS = {
    "ratio": Panel("effect as a multiple of the published one →", ((0, "none"), (1, "as published")), (-2, 4)),
    "direction": Panel(
        "no published size: effect in half-widths of its interval, published direction →",
        ((0, "none"), (1, "shown")),
        (-4, 8),
    ),
    "same": Panel(
        "said to be the same: difference in margins", ((-1, "−margin"), (0, "none"), (1, "+margin")), (-3, 3)
    ),
}


def forest(claims: list[Placed]) -> str:
    """Return the plot of all claims that have an interval, or "" if none has."""
    rows: dict[str, list[Row]] = {name: [] for name in PANELS}
    for one in claims:
        if placed_row := _drawn(one):
            rows[placed_row[0]].append(placed_row[1])
    parts, top = [], 0
    for name, panel in PANELS.items():
        if rows[name]:
            text, height = _panel(panel, rows[name], top)
            parts.append(text)
            top += height
    if not parts:
        return ""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" role="img"'
    )
    style = 'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="12"'
    return f'{head} {style}>\n<rect width="{WIDTH}" height="{top}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"


def deciding(one: Placed) -> JudgedTest | None:
    """Return the test that decides a claim: of those with the claim's verdict, the one that supports it least."""
    tests = [
        test for test in one.claim.tests if test.low is not None and test.high is not None and test.mean is not None
    ]
    alike = [test for test in tests if test.verdict == one.claim.verdict] or tests
    return min(alike, key=_strength, default=None)


def _strength(test: JudgedTest) -> float:
    """Return how strongly a test supports its claim, in the unit of its panel."""
    _, row = _scaled(test)
    return -max(abs(row[1]), abs(row[2])) if test.says == "same" else row[1]


def _drawn(one: Placed) -> tuple[str, Row] | None:
    test = deciding(one)
    # the lines of a panel are those of a difference of 0, and not of an amount to exceed
    if test is None or test.by is not None or one.claim.verdict == "not testable here":
        return None
    kind, (mean, low, high) = _scaled(test)
    return kind, Row(one.line, one.study, mean, low, high, one.claim.verdict)


def _scaled(test: JudgedTest) -> tuple[str, tuple[float, float, float]]:
    assert test.mean is not None and test.low is not None and test.high is not None
    ends = (test.mean, test.low, test.high)
    if test.ratio is not None and not test.along_axis:
        return "ratio", test.ratio
    if test.says == "same":
        unit = test.margin or max(abs(test.low), abs(test.high)) or 1.0
        return "same", (ends[0] / unit, ends[1] / unit, ends[2] / unit)
    # equal differences have an interval of width 0
    half = (test.high - test.low) / 2 or abs(test.mean) / 100 or 1.0
    sign = SIGNS[test.says]
    low, high = sorted((sign * test.low / half, sign * test.high / half))
    return "direction", (sign * test.mean / half, low, high)


def _panel(panel: Panel, rows: list[Row], top: int) -> tuple[str, int]:
    marks = [value for value, _ in panel.lines]
    low = max(panel.reach[0], min([*marks, *(row.low for row in rows)]))
    high = min(panel.reach[1], max([*marks, *(row.high for row in rows)]))
    span = (high - low) or 1.0
    low, high = low - 0.04 * span, high + 0.04 * span

    def x(value: float) -> float:
        return round(LEFT + (min(max(value, low), high) - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    bottom = top + HEAD + ROW * len(rows)
    text = [f'<text x="{LEFT}" y="{top + 20}" font-weight="600" fill="#1b1d21">{escape(panel.title)}</text>']
    for value, words in panel.lines:
        dash = "" if value == 0 else ' stroke-dasharray="4 3"'
        text.append(
            f'<line x1="{x(value)}" x2="{x(value)}" y1="{top + HEAD - 6}" y2="{bottom}" stroke="#7b828c"{dash}/>'
        )
        text.append(f'<text x="{x(value)}" y="{bottom + 16}" text-anchor="middle" fill="#4d545e">{words}</text>')
    for at, row in enumerate(rows):
        text += _row(row, x, top + HEAD + ROW * at, (low, high))
    return "\n".join(text), bottom + FOOT - top


def _row(row: Row, x, top: int, ends: tuple[float, float]) -> list[str]:  # type: ignore[no-untyped-def]
    tone = "held" if row.verdict in HELD else "open" if row.verdict in ("undecided", "margin too wide") else "against"
    colour, y = COLOURS[tone], top + 28
    shapes = {
        "held": '<circle cx="{}" cy="{}" r="5" fill="{}"/>',
        "open": '<circle cx="{}" cy="{}" r="4.5" fill="#fff" stroke="{}" stroke-width="2"/>',
    }
    point = shapes.get(tone, '<path d="M{0} {1}m-6 -5h12l-6 10z" fill="{2}"/>').format(x(row.mean), y, colour)
    elements = [
        # a white outline keeps the text legible over the lines
        f'<text x="{LEFT}" y="{top + 12}" fill="#1b1d21" stroke="#fff" stroke-width="4" '
        f'paint-order="stroke">{escape(row.line)}</text>',
        f'<line x1="{x(row.low)}" x2="{x(row.high)}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2.5"/>',
        *([point] if ends[0] <= row.mean <= ends[1] else []),
        f'<text x="{WIDTH - 6}" y="{top + 12}" text-anchor="end" font-size="11" fill="#4d545e">{row.study}</text>',
        f'<text x="{WIDTH - 6}" y="{y + 4}" text-anchor="end" fill="{colour}">{escape(_number(row))}</text>',
    ]
    if row.low < ends[0]:
        elements.append(f'<path d="M{LEFT} {y}l7 -4v8z" fill="{colour}"/>')
    if row.high > ends[1]:
        elements.append(f'<path d="M{WIDTH - RIGHT} {y}l-7 -4v8z" fill="{colour}"/>')
    return elements


def _number(row: Row) -> str:
    if abs(row.mean) >= 100:
        # the differences are equal, or nearly so
        return f"{'more' if row.mean > 0 else 'less'} than {100 if row.mean > 0 else -100}".replace("-", "−")
    mean, low, high = (f"{one:.2g}" for one in (row.mean, row.low, row.high))
    return f"{mean} [{low}, {high}]".replace("-", "−")
