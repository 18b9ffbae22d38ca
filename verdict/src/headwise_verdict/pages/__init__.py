"""Self-contained HTML pages: their shell, charts and number formats.

This is a door: what other parts make a page from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise_verdict.files.doors import door

if TYPE_CHECKING:
    from headwise_verdict.pages.charts import pairs_of as pairs_of
    from headwise_verdict.pages.charts import robust_heat_map as robust_heat_map
    from headwise_verdict.pages.shell import Column as Column
    from headwise_verdict.pages.shell import Section as Section
    from headwise_verdict.pages.shell import figure as figure
    from headwise_verdict.pages.shell import findings as findings
    from headwise_verdict.pages.shell import fold as fold
    from headwise_verdict.pages.shell import grid as grid
    from headwise_verdict.pages.shell import join as join
    from headwise_verdict.pages.shell import page as page
    from headwise_verdict.pages.shell import pairs as pairs
    from headwise_verdict.pages.shell import prose as prose
    from headwise_verdict.pages.shell import subtitle as subtitle
    from headwise_verdict.pages.shell import table as table

# each name with its module, imported on first use
_DOOR = {
    # a whole page of sections
    "page": "shell",
    # a section with its heading
    "Section": "shell",
    # a heading inside a section
    "subtitle": "shell",
    # paragraphs
    "prose": "shell",
    # findings with their remedies
    "findings": "shell",
    # names with their values
    "pairs": "shell",
    # a table
    "table": "shell",
    # a column of it
    "Column": "shell",
    # figures next to each other
    "grid": "shell",
    # a chart with title and caption
    "figure": "shell",
    # what is shown when it is opened
    "fold": "shell",
    # parts one below the other
    "join": "shell",
    # a heat map whose colours no outlier flattens
    "robust_heat_map": "charts",
    # a chart of points
    "pairs_of": "charts",
}
__getattr__, __all__ = door(__name__, _DOOR)
