"""Return the sections and figures of a page anchors that no two share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Anchored(Protocol):
    """What has an anchor of its own wish."""

    @property
    def anchor(self) -> str:
        """Return the anchor that it asks for."""


S = TypeVar("S", bound=Anchored)


def slug(text: str) -> str:
    """Return text as it may stand in an anchor and in a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]


def with_anchors(sections: Iterable[S]) -> list[tuple[S, str]]:
    """Return the sections with anchors that no two share."""
    seen: dict[str, int] = {}
    found: list[tuple[S, str]] = []
    for section in sections:
        seen[section.anchor] = count = seen.get(section.anchor, 0) + 1
        found.append((section, section.anchor if count == 1 else f"{section.anchor}-{count}"))
    return found


def unique_anchors(html: str) -> str:
    """Number the figures that share a name, so that each has an anchor of its own."""
    seen: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        seen[found[1]] = count = seen.get(found[1], 0) + 1
        return f'<figure id="{found[1]}{"" if count == 1 else f"-{count}"}"'

    return re.sub(r'<figure id="(figure-[a-z0-9-]*)"', number, html)
