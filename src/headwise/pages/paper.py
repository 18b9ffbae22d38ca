"""Turn a chart of a page into one that stands alone: fixed width, the light colours, the page's look."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

WIDTH = 640
VARIABLE = re.compile(r"var\((--[a-z]+)\)")
SERIES = ("--blue", "--orange", "--green", "--purple", "--sky", "--vermillion", "--grey")


def on_paper(spec: dict[str, Any], width: int = WIDTH) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a Vega-Lite dictionary whose colours are those of light paper and whose width is fixed, and the look to
    draw it in."""
    resolved = {key: value if key == "datasets" else _resolved(value) for key, value in spec.items()}
    return resolved | {"width": width, "background": "white"}, _look()


def _resolved(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: value if key == "values" else _resolved(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolved(item) for item in node]
    found = VARIABLE.fullmatch(node) if isinstance(node, str) else None
    return _colours()[found[1]] if found else node


@cache
def _colours() -> dict[str, str]:
    # the first block of the style sheet holds the light colours
    style = (files("headwise.pages") / "shell.css").read_text(encoding="utf-8").partition("}")[0]
    return dict(re.findall(r"(--[a-z]+): (#[0-9a-f]+);", style))


def _look() -> dict[str, Any]:
    colours = _colours()
    muted, line, rule = (colours[name] for name in ("--muted", "--line", "--rule"))
    axis = {
        "labelColor": muted,
        "titleColor": muted,
        "gridColor": line,
        "domainColor": rule,
        "tickColor": rule,
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11.5,
    }
    legend = {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal", "symbolSize": 70}
    series = {"category": [colours[name] for name in SERIES]}
    return {
        "axis": axis,
        "legend": legend,
        "view": {"stroke": None},
        "range": series,
        "text": {"color": colours["--ink"]},
    }
