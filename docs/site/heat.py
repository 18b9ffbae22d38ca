"""Small heat maps as SVG, side by side: blue above 0, red below, white at 0."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CELL, GAP, TOP = 15, 26, 34
ABOVE, BELOW = (0, 90, 156), (190, 64, 18)

Map = Sequence[Sequence[float]]


def heat_maps(panels: Sequence[tuple[str, Map]], *, top: float, described: str) -> str:
    """Return an SVG of maps with their titles; queries run down, keys to the right, full colour at `top` and above."""
    parts, left = [], 0
    for title, rows in panels:
        width, height = len(rows[0]) * CELL, len(rows) * CELL
        parts.append(f'<text x="{left}" y="{TOP - 10}">{escape(title)}</text>')
        parts += [
            _cell(left + CELL * x, TOP + CELL * y, value, top)
            for y, row in enumerate(rows)
            for x, value in enumerate(row)
        ]
        parts.append(f'<rect x="{left}" y="{TOP}" width="{width}" height="{height}" fill="none" stroke="#777"/>')
        left += width + GAP
    size = f'width="{left - GAP + 2}" height="{TOP + height + 2}" viewBox="-1 0 {left - GAP + 2} {TOP + height + 2}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#777"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} '
        f"{style}><title>{escape(described)}</title>{''.join(parts)}</svg>\n"
    )


def _cell(x: int, y: int, value: float, top: float) -> str:
    share, full = min(abs(value) / top, 1.0), ABOVE if value >= 0 else BELOW
    colour = "".join(f"{round(255 + (channel - 255) * share):02x}" for channel in full)
    return f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="#{colour}"/>'
