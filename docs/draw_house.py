"""Read the floors of the code from its imports and draw them: `python docs/draw_house.py [--check]`.

A room is a folder or file directly in `src/headwise`. A file may import from its own floor and from lower ones. Imports for
types, imports inside functions and modules named in `import_module` count like any other.
"""

from __future__ import annotations

import ast
import html
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "headwise"
PICTURE = ROOT / "docs" / "house.svg"

# From the ground up. The package itself, `study` and `report` are doors: names that users import, and nothing else.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("files", "pages"),
    ("core",),
    ("attention", "projections"),
    ("methods", "statistics", "hosts"),
    ("regularizing",),
    ("watching", "auditing", "comparing"),
    ("studies", "cli"),
    ("headwise", "study", "report", "__main__"),
)


@dataclass(frozen=True)
class Arrow:
    """One import: the file and line where it stands, and the module that it takes."""

    file: Path
    line: int
    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.file.as_posix()}:{self.line}: {self.importer} imports {self.imported}"


class House:
    """The modules below one package folder and what they import from each other."""

    def __init__(self, source: Path = SOURCE) -> None:
        self.source, self.package = source, source.name
        self.files = {self._module(path): path for path in sorted(source.rglob("*.py"))}

    def _module(self, path: Path) -> str:
        parts = (self.package, *path.relative_to(self.source).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def arrows(self) -> list[Arrow]:
        """Give every import of one module of the package by another."""
        return [arrow for module, path in self.files.items() for arrow in self._arrows(module, path)]

    def _arrows(self, module: str, path: Path) -> list[Arrow]:
        found = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in self._taken(node, module, path.name == "__init__.py"):
                known = self._known(name)
                if known and known != module:
                    found.append(Arrow(path.relative_to(self.source.parent.parent), node.lineno, module, known))
        return found

    def _taken(self, node: ast.AST, module: str, is_package: bool) -> list[str]:
        """Name what a statement or call imports, as far as a name can be read."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            return [f"{base}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            return [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return []

    def _known(self, name: str) -> str | None:
        """Give the longest part of a dotted name that is a module here: `a.b.c` may be the name c in the module a.b."""
        while name.partition(".")[0] == self.package:
            if name in self.files:
                return name
            name = name.rpartition(".")[0]
        return None

    def room(self, module: str) -> str:
        """Give the room of a module: the folder or file directly in the package."""
        parts = module.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    def purpose(self, room: str) -> str:
        """Give the first sentence of what a room's own file says about it."""
        module = self.package if room == self.package else f"{self.package}.{room}"
        told = ast.get_docstring(ast.parse(self.files[module].read_text(encoding="utf-8"))) or ""
        return " ".join(told.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")

    def floor(self, module: str) -> int | None:
        """Give the floor of a module, or None where its room stands on none."""
        room = self.room(module)
        return next((i for i, rooms in enumerate(FLOORS) if room in rooms), None)

    def homeless(self) -> list[str]:
        """Name the files whose room stands on no floor."""
        return [str(path) for module, path in self.files.items() if self.floor(module) is None]

    def upward(self) -> list[Arrow]:
        """Give the imports from a higher floor."""
        floors = {module: floor for module in self.files if (floor := self.floor(module)) is not None}
        both = [a for a in self.arrows if a.importer in floors and a.imported in floors]
        return [arrow for arrow in both if floors[arrow.imported] > floors[arrow.importer]]

    def circles(self) -> list[Arrow]:
        """Give the imports that lie on a circle of files: from each of these files one comes back to it."""
        below: dict[str, set[str]] = {module: set() for module in self.files}
        for arrow in self.arrows:
            below[arrow.importer].add(arrow.imported)
        reached = {module: _reach(module, below) for module in below}
        return [arrow for arrow in self.arrows if arrow.importer in reached[arrow.imported]]


def _reach(start: str, below: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [*below[start]]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += below[module]
    return seen


def draw(house: House) -> str:
    """Draw the floors as an SVG, the highest at the top; each room tells what it is for and which rooms it uses."""
    wide, high, left = 1000, 118, 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high * len(FLOORS) + 8}" font-family="sans-serif">',
        f'<rect width="{wide}" height="{high * len(FLOORS) + 8}" fill="#ffffff"/>',
    ]
    for level, rooms in enumerate(FLOORS):
        top = high * (len(FLOORS) - 1 - level) + 8
        parts.append(f'<text x="12" y="{top + 46}" font-size="20" fill="#667">{level}</text>')
        step = (wide - left - 10) / len(rooms)
        for place, room in enumerate(rooms):
            parts += _room(house, room, left + step * place, top, step - 10, high - 14)
    return "\n".join([*parts, "</svg>", ""])


def _room(house: House, room: str, x: float, y: float, width: float, height: float) -> list[str]:
    used = sorted({house.room(a.imported) for a in house.arrows if house.room(a.importer) == room} - {room})
    texts = [(room, 16, "#123"), (house.purpose(room), 11, "#345"), (f"uses {', '.join(used) or 'torch alone'}", 10, "#678")]
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="#eef3fa" stroke="#8aa"/>'
    drawn, at = [box], y + 6
    for text, size, colour in texts:
        for line in _wrapped(text, int(width / (0.56 * size))):
            at += size + 4
            drawn.append(f'<text x="{x + 8:.0f}" y="{at:.0f}" font-size="{size}" fill="{colour}">{html.escape(line)}</text>')
    return drawn


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main() -> int:
    """Write the picture; with --check only say whether it is what the code gives."""
    picture = draw(House())
    if "--check" in sys.argv:
        same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture
        print("" if same else f"{PICTURE.name} is not what the code gives: run python docs/draw_house.py", end="" if same else "\n")
        return 0 if same else 1
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
