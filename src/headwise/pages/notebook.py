"""Tables that a notebook shows, of plain HTML that needs no library and no style of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# rows that are shown at most; the rest is counted
ROWS = 100


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Return a table with its title above and a note below, every text escaped.

    Args:
        title: what it is, in a sentence.
        columns: their heads.
        rows: cells, of which numbers are written to four digits.
        note: what to know of it.
    """
    listed = list(rows)
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{escape(_text(cell))}</td>' for cell in row) + "</tr>"
        for row in listed[:ROWS]
    )
    more = f"{len(listed) - ROWS} more rows. " if len(listed) > ROWS else ""
    below = f"<p>{escape(more + note)}</p>" if more or note else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if listed else ""
    return f"<div><p><b>{escape(title)}</b></p>{table}{below}</div>"


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else "–" if cell is None else str(cell)
