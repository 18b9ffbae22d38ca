"""Print the answer of a study as a table: rich in a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import sys
from typing import Any

COLUMNS = ("method", "{label}", "difference to baseline", "p (Holm)", "verdict", "gap", "ms/step", "MB/step")


def print_table(analysis: dict[str, Any] | None) -> None:
    """Print one row per method and the answer in words; nothing for a study of findings."""
    if not analysis or "methods" not in analysis:
        return
    header = [name.format(label=analysis["metric"]["label"]) for name in COLUMNS]
    rows = [_row(method, analysis["metric"]) for method in analysis["methods"]]
    print()
    if sys.stdout.isatty():
        _print_rich(header, rows)
    else:
        _print_plain(header, rows)
    print(f"\n{analysis['answer']}")


def _row(method: dict[str, Any], metric: dict[str, Any]) -> list[str]:
    name, percent = metric["name"], metric["unit"] == "%"
    found, costs = method["metrics"], method["costs"]
    difference = method["differences"].get(name)
    kind = name.partition("_")[2]
    gap = found.get(f"gap_{kind}")
    label = method["label"]
    if method["runs"]["diverged"]:
        label += f" ({len(method['runs']['diverged'])} diverged)"
    # a method has no figure because nothing finished, or because all that ended diverged
    absent = "diverged" if method["runs"]["diverged"] and not method["runs"]["finished"] else "none"
    return [
        label,
        _interval(found[name], percent, absent),
        _interval(difference, percent, absent, sign=True) if difference else "",
        f"{difference['p_corrected']:.3f}" if difference and difference["p_corrected"] is not None else "",
        difference["verdict_text"] if difference else "",
        (_number(gap["mean"], percent) or absent) if gap else "",
        _scaled(costs["seconds_per_step"], 1e3),
        _scaled(costs["peak_memory_bytes"], 1e-6),
    ]


def _interval(found: dict[str, Any], percent: bool, absent: str, *, sign: bool = False) -> str:
    middle = _number(found["mean"], percent, sign=sign) or absent
    if found["low"] is None:
        return middle
    return f"{middle} [{_number(found['low'], percent, sign=sign)}, {_number(found['high'], percent, sign=sign)}]"


def _number(value: float | None, percent: bool, *, sign: bool = False) -> str:
    if value is None:
        return ""
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.2f}" if percent else f"{value:{plus}.4f}"


def _scaled(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:.2f}"


def _print_plain(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(header: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False)
    for name in header:
        table.add_column(name, justify="left" if name in ("method", "verdict") else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
