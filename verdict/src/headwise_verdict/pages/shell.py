"""A self-contained HTML page with the style, the sortable tables and the charts that all headwise reports share.

The audit and the comparison use it like this::

    from headwise_verdict.pages.charts import heat_map
    from headwise_verdict.pages.shell import Column, Section, figure, page, table

    columns = [Column("head"), Column("entropy", unit="nats", number=True)]
    rows = [["blocks.0.attn head 1", 1.25], ["blocks.0.attn head 2", None]]      # None is shown as "missing"
    chart = heat_map(
        [{"layer": 0, "head": 1, "value": 1.25}, {"layer": 0, "head": 2, "value": 0.75}], value_title="entropy (nats)")
    sections = [
        Section("Worst heads", table(columns, rows)),
        Section("Entropy", figure(chart, title="Attention entropy", caption="Low is collapsed.")),
    ]
    html = page("Audit of my-model", sections, eyebrow="headwise audit", lead="Two heads need attention.",
                facts=[("layers", 12), ("heads", 12)])
    Path("report.html").write_text(html, encoding="utf-8")

Every string is escaped, except `markupsafe.Markup`, as from `table`, `figure`, `prose`, `pairs`, `grid` and `join`. A
page with charts contains the Vega libraries once (900 kB). It never opens a connection, which its security policy also
forbids. Colours in charts are CSS variables, for example `var(--blue)`, and follow the light and dark mode.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from headwise_verdict.files.cached_text import cached_text

if TYPE_CHECKING:
    from altair import TopLevelMixin
    from jinja2 import Template
    from markupsafe import Markup


def slug(text: str) -> str:
    """Return text in the form of an anchor or a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]


def with_anchors(sections: Iterable[Section]) -> list[tuple[Section, str]]:
    """Return the sections, each with a unique anchor."""
    seen: dict[str, int] = {}
    anchored: list[tuple[Section, str]] = []
    for section in sections:
        seen[section.anchor] = count = seen.get(section.anchor, 0) + 1
        anchored.append((section, section.anchor if count == 1 else f"{section.anchor}-{count}"))
    return anchored


def unique_anchors(html: str) -> str:
    """Return the page with numbers on the anchors of figures that share a name."""
    seen: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        seen[match[1]] = count = seen.get(match[1], 0) + 1
        return f'<figure id="{match[1]}{"" if count == 1 else f"-{count}"}"'

    return re.sub(r'<figure id="(figure-[a-z0-9-]*)"', number, html)


def asset(name: str) -> str:
    """Return the text of a file of this package."""
    return (files("headwise_verdict.pages") / name).read_text(encoding="utf-8")


@cache
def template(name: str) -> Template:
    """Return a template that escapes its values and raises on undefined names."""
    jinja2 = import_module("jinja2")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(asset(name))


@cache
def vega() -> str:
    """Return the script that draws charts, about 900 kB, escaped for a script element."""
    converter, version = import_module("vl_convert"), _vega_lite_version()
    name = f"vega-{version}-by-vl-convert-{converter.__version__}.js"
    bundle = cached_text(name, lambda: converter.javascript_bundle(vl_version=version))
    # "</script" must not occur inside a script element.
    return re.sub(r"</(script)", r"<\\/\1", bundle, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _vega_lite_version() -> str:
    schema = import_module("altair").SCHEMA_VERSION
    return ".".join(schema.lstrip("v").split(".")[:2])


CANVAS_FROM = 3000  # marks; more would make a slow SVG


@dataclass(frozen=True)
class Column:
    """A column: its heading, a unit shown small below it, and whether it holds numbers (right-aligned) or wide text."""

    name: str
    unit: str = ""
    number: bool = False
    wide: bool = False


@dataclass(frozen=True)
class TableCell:
    """A cell: its text, the number it is sorted by, a tone (`better`, `worse`, ...), small print and a link.

    `brief` is a row's heading on paper. `href` is a path relative to the report; a scheme or a host is refused.
    """

    text: Any
    value: float | None = None
    tone: str = ""
    small: str = ""
    href: str = ""
    brief: str = ""

    def __post_init__(self) -> None:
        if ":" in self.href or self.href.startswith("/"):
            raise ValueError(
                f"A link of a report must be a relative path, got {self.href!r}: the report works without a network."
            )


@dataclass(frozen=True)
class Section:
    """A section: title, body as markup, introduction, whether it starts collapsed, and whether it is an appendix.

    An appendix is printed only if the reader chooses so.
    """

    title: str
    body: Any
    intro: str = ""
    collapsed: bool = False
    appendix: bool = False

    @property
    def anchor(self) -> str:
        """Return the section's id in the page."""
        return slug(self.title) or "section"


def page(
    title: str,
    sections: Iterable[Section],
    *,
    eyebrow: str = "headwise",
    question: str = "",
    lead: str = "",
    below: Any = "",
    facts: Iterable[tuple[str, object]] = (),
) -> str:
    """Return the whole page as one HTML string.

    `lead` is the answer in sentences; `below` is markup under it, such as its warnings; `facts` are (name, value)
    pairs shown under both. The chart libraries are embedded only when a section holds a chart.
    """
    anchored = with_anchors(sections)
    markup = import_module("markupsafe").Markup
    drawn = any('data-chart="' in str(section.body) for section, _ in anchored)
    html = template("page.html").render(
        title=title,
        eyebrow=eyebrow,
        question=question,
        lead=lead,
        below=below,
        facts=[(str(name), str(value)) for name, value in facts],
        sections=anchored,
        css=markup(asset("shell.css")),
        script=markup(asset("shell.js")),
        bundle=markup(vega()) if drawn else "",
        version=_version(),
    )
    return unique_anchors(html)


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Any]],
    *,
    caption: str = "",
    marked: Iterable[int] = (),
    sort: bool = True,
) -> Markup:
    """Return a table that is sorted by click or keyboard and scrolls in its own box.

    A row is a list of `TableCell`, string, number or None (shown as "missing" and sorted last); its first cell is the
    row's heading. `marked` are the numbers of rows to highlight (the baseline).
    """
    prepared = [[_cell(item) for item in row] for row in rows]
    widths = {len(row) for row in prepared} - {len(columns)}
    if widths:
        raise ValueError(f"A table of {len(columns)} columns got rows of {sorted(widths)} cells: give one per column.")
    return _macro("table", columns, prepared, caption, set(marked), sort)


def figure(
    chart: dict[str, Any] | TopLevelMixin, *, title: str = "", caption: str = "", trace: str = "", name: str = ""
) -> Markup:
    """Return a chart as markup: `chart` is an Altair chart or a Vega-Lite dictionary.

    `name` is for screen readers, the anchor and the file; by default the title. `trace` names the list that the data of
    each cell has under "spectrum"; it is drawn below the chart for the cell under the pointer.
    """
    spec = chart if isinstance(chart, dict) else chart.to_dict()
    marks = sum(len(values) for values in spec.get("datasets", {}).values())
    renderer = "canvas" if marks > CANVAS_FROM else "svg"
    name = name or title or "chart"
    return _macro("figure", _json(spec), title, caption, trace, renderer, name, slug(name))


def prose(paragraphs: Iterable[object], *, kind: str = "prose") -> Markup:
    """Return paragraphs of escaped text as markup; `kind` is "prose", "note" (small print) or "warning"."""
    return _macro("prose", [str(paragraph) for paragraph in paragraphs], kind)


def subtitle(text: str) -> Markup:
    """Return a heading within a section."""
    return _macro("subtitle", text)


def findings(items: Iterable[Sequence[Any]]) -> Markup:
    """Return a list that is read on any screen: (heading, sentences) or (heading, sentences, source) per entry."""
    return _macro("findings", [tuple(item) for item in items])


def pairs(items: Mapping[str, object] | Iterable[tuple[str, object]]) -> Markup:
    """Return (name, value) pairs, or a dictionary, as a two-column list; nested values are shown as JSON."""
    items = items.items() if isinstance(items, Mapping) else items
    return _macro("pairs", [(str(name), _plain(value)) for name, value in items])


def grid(parts: Iterable[Any], *, wide: bool = False) -> Markup:
    """Return the parts side by side if there is room, else below each other."""
    return _macro("grid", list(parts), wide)


def fold(title: str, body: Any, *, opened: bool = False) -> Markup:
    """Return the body under a title that opens and closes; its charts are drawn when it is opened."""
    return _macro("fold", title, body, opened)


def legend(entries: Iterable[tuple[str, str, bool]]) -> Markup:
    """Return a legend of lines: (words, colour variable such as "--blue", dashed) per entry."""
    return _macro("legend", list(entries))


def join(*parts: Any) -> Markup:
    """Return the parts as one piece of markup; plain strings are escaped."""
    return import_module("markupsafe").Markup("\n").join(parts)


def preformatted(text: str) -> Markup:
    """Return text as a block of code."""
    return _macro("preformatted", text)


def _cell(item: Any) -> TableCell:
    if isinstance(item, TableCell):
        return item
    if item is None or (isinstance(item, float) and math.isnan(item)):
        return TableCell(None)
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return TableCell(f"{item:,}" if isinstance(item, int) else f"{item:.4g}", float(item))
    return TableCell(item)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which leave a gap in a chart."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(spec: dict[str, Any]) -> Markup:
    # Only "<" can end a script element or open a comment in it; JSON readers turn the escape back into "<".
    text = json.dumps(_finite(spec), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return import_module("markupsafe").Markup(text)


def _macro(name: str, *arguments: Any) -> Markup:
    return getattr(template("parts.html").module, name)(*arguments)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headwise")
    except PackageNotFoundError:
        return ""
