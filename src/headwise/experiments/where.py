"""Where an arm's methods act: depths (`2-5`, `0,3`) or a pattern on layer names (`encoder`, `*.cross_attn`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from headwise.core.settings import suggest
from headwise.files.errors import StudyError

if TYPE_CHECKING:
    from headwise.core.site import Site

DEPTHS = re.compile(r"\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*$")
# every depth of a range is kept: a slip of the finger must not fill the memory
DEEPEST = 100_000
PATTERN = re.compile(r"[\w.*?\[\]!-]+$")


@dataclass(frozen=True)
class Where:
    """Hold which attention layers change: by depth, counted from 0 in each stack, or by name."""

    depths: tuple[int, ...] = ()
    pattern: str = ""

    def __call__(self, site: Site) -> bool:
        """Return whether a layer is meant: its depth is listed, or the pattern is its name or whole parts of it."""
        if self.depths:
            return site.depth in self.depths
        return fnmatchcase(site.name, self.pattern) or f".{self.pattern}." in f".{site.name}."

    def check(self, sites: list[Site]) -> None:
        """Refuse a depth that no layer has, or a pattern that names none.

        Raises:
            StudyError: with the layers there are.
        """
        missing = [depth for depth in self.depths if all(site.depth != depth for site in sites)]
        if missing:
            most = max((site.depth for site in sites), default=-1)
            raise StudyError(
                f"'@ {self}' asks for depth {missing[0]}; attention layers have depths 0 to {most}, counted from 0."
                if most >= 0
                else f"'@ {self}': the model has no attention layer."
            )
        if self.pattern and not any(map(self, sites)):
            known = sorted({part for site in sites for part in (site.name, *site.name.split("."))})
            names = ", ".join(site.name for site in sites)
            raise StudyError(
                f"'@ {self}' names no attention layer.{suggest(self.pattern, known)} Layers: {names or 'none'}."
            )

    def __str__(self) -> str:
        return self.pattern or ",".join(_ranges(self.depths))


def read_where(text: str) -> Where:
    """Read depths or a pattern.

    Raises:
        StudyError: where the text is neither, or a range runs backwards.
    """
    if DEPTHS.match(text):
        depths: set[int] = set()
        for part in text.split(","):
            first, _, last = (piece.strip() for piece in part.partition("-"))
            if last and int(last) < int(first):
                raise StudyError(f"'@ {text}' runs backwards: write {last}-{first}.")
            if int(last or first) >= DEEPEST:
                raise StudyError(f"'@ {text}' asks for depth {last or first}, which no model has.")
            depths |= set(range(int(first), int(last or first) + 1))
        return Where(depths=tuple(sorted(depths)))
    if PATTERN.match(text):
        return Where(pattern=text)
    raise StudyError(
        f"cannot read layers from '@ {text}'; write depths (2-5, or 0,3), or a pattern on names (encoder)."
    )


def _ranges(depths: tuple[int, ...]) -> list[str]:
    found: list[list[int]] = []
    for depth in depths:
        if found and found[-1][1] == depth - 1:
            found[-1][1] = depth
        else:
            found.append([depth, depth])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]
