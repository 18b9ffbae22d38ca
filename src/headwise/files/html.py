"""A table as HTML, for notebooks: all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# the most rows to show; the others are counted
ROWS = 100


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Return a table with its title above and a note below; all text is escaped.

    Args:
        title: a sentence above the table.
        columns: the column headings.
        rows: the cells of each row; floats are shown with four digits.
        note: text below the table.
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
