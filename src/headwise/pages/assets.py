"""The parts of a page that lie in files: its style, its script, its templates, and the Vega libraries."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from headwise.files.optional_imports import load

if TYPE_CHECKING:
    from jinja2 import Template


def asset(name: str) -> str:
    """Return the text of a file of this package."""
    return (files("headwise.pages") / name).read_text(encoding="utf-8")


@cache
def template(name: str) -> Template:
    """Return a template that escapes what it is given and refuses names that it is not given."""
    jinja2 = load("jinja2", "study")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(asset(name))


@cache
def vega() -> str:
    """Return the script that draws charts, about 900 kB, as it may stand inside a page."""
    # The snippet is ours; "</script" must not occur in what stands inside the script element.
    bundle = load("vl_convert", "study").javascript_bundle(vl_version=_vega_lite_version())
    return re.sub(r"</(script)", r"<\\/\1", bundle, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _vega_lite_version() -> str:
    schema = load("altair", "study").SCHEMA_VERSION
    return ".".join(schema.lstrip("v").split(".")[:2])
