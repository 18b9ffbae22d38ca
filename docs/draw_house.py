"""Check the floors of the code against its imports and draw them: `python docs/draw_house.py [--check]`.

A room is a folder or file directly in `src/headwise`, in one of its parts `attend`, `health` and `lab`, or in
`verdict/src/headwise_verdict`. A file may import from its own floor and from lower ones. Imports
for types, imports inside functions and modules named in `import_module` count like any other.
"""

from __future__ import annotations

import ast
import html
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "src" / "headwise", ROOT / "verdict" / "src" / "headwise_verdict")
PICTURE = ROOT / "docs" / "house.svg"

# Folders whose folders and files are the rooms, named attend.core; those of headwise_verdict are named verdict.results.
PARTS = ("attend", "health", "lab")
VERDICT = "headwise_verdict"

# From the ground up. `attend`, `health`, `lab` and `verdict` are the doors of their parts. The package itself, `study`,
# `report`, `testing`, `lightning` and `axolotl` are modules that users import and no room does; `testing` also contains
# the checks that it offers.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("verdict.files", "verdict.pages"),
    ("verdict.results",),
    ("verdict.reporting",),
    ("verdict.judging", "verdict.cli", "verdict"),
    ("files", "borders", "numerics"),
    ("attend.core",),
    ("attend.attention", "attend.projections"),
    ("attend.methods", "attend.hosts"),
    ("attend.regularizing", "attend.compressing"),
    ("attend.optimizers", "attend"),
    ("health.statistics", "health.health_records"),
    ("health.watching",),
    ("health.auditing", "health"),
    ("lab.files", "lab.experiments"),
    ("lab.training",),
    ("lab.engines",),
    ("lab.comparing",),
    ("lab.studies", "lab", "cli"),
    ("headwise", "study", "report", "testing", "lightning", "axolotl", "__main__"),
)
TITLES = (
    "verdict, without torch: files, pages",
    "records of results, and their statistics",
    "pages and tables",
    "judge one change",
    "ground of headwise",
    "attend: vocabulary of the methods",
    "attention, and its weights",
    "collections: one file each",
    "regularize and compress: models change",
    "optimizers by head",
    "health: statistics",
    "watch a training",
    "audit a checkpoint",
    "lab: definition of an experiment",
    "one run",
    "engines distribute runs",
    "compare: the drivers",
    "commands that a user runs",
    "names that users import",
)
# Rooms to which contributors add files.
GROWING = ("attend.methods", "health.statistics", "attend.hosts", "lab.studies")

# The parts that have doors, each with the module that is it. What needs no door: `files`, `borders` and `numerics`, the
# ground; and the package, `study` and `report`, which list for users what is inside.
DOORS = {"attend": "headwise.attend", "health": "headwise.health", "lab": "headwise.lab", "verdict": VERDICT}
# Rooms that are doors of their part too: their `__all__` lists what other parts take of weights, layers and optimizers,
# and of the files and records that verdict reads and others write.
SIDE_DOORS = (
    "headwise.attend.projections",
    "headwise.attend.hosts",
    "headwise.attend.optimizers",
    "headwise_verdict.files",
    "headwise_verdict.results",
)
# The largest number of names through a door.
WIDEST = 15
# Imports past a door, from a part into another: as many as there are, and why. None may join them; where one goes, the
# number goes down.
PAST = {
    ("health", "attend"): (14, "leaves of modules, and places, which walk over layers"),
    ("health", "verdict"): (16, "the page of an audit is made of the parts of verdict's pages"),
    ("lab", "attend"): (10, "schedules in arms, captured steps"),
    ("lab", "health"): (11, "the command line, names of outcomes, the callback that looks for its Trainer"),
    ("lab", "verdict"): (23, "commands, judged pairs, tables of logs, the page of a study"),
    ("headwise", "attend"): (5, "the checks of a method look at its stages"),
    ("headwise", "health"): (1, "the Lightning callback is written on the parts of watch"),
    ("headwise", "verdict"): (4, "assert_not_worse"),
}

# The dimensions of the picture in pixels.
WIDE, LEFT, RIGHT, ROOF, HIGH = 1000, 178, 918, 110, 96
OPEN = "#e6f3e2"


@dataclass(frozen=True)
class Arrow:
    """One import: its file and line, the importing module, and the imported one."""

    file: Path
    line: int
    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.file.as_posix()}:{self.line}: {self.importer} imports {self.imported}"


class House:
    """The modules of package folders and their imports of each other."""

    def __init__(self, *sources: Path) -> None:
        self.sources = sources or SOURCES
        self.packages = tuple(source.name for source in self.sources)
        self.files = {_module(path, source): path for source in self.sources for path in sorted(source.rglob("*.py"))}

    @cached_property
    def arrows(self) -> list[Arrow]:
        """Return every import of one module of the package by another."""
        return [arrow for module, path in self.files.items() for arrow in self._arrows(module, path)]

    def _arrows(self, module: str, path: Path) -> list[Arrow]:
        arrows = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in self._taken(node, module, path.name == "__init__.py"):
                known = self._known(name)
                if known and known != module:
                    arrows.append(Arrow(self._shown(path), node.lineno, module, known))
        return arrows

    def _shown(self, path: Path) -> Path:
        root = ROOT if path.is_relative_to(ROOT) else self.sources[0].parent.parent
        return path.relative_to(root)

    def _taken(self, node: ast.AST, module: str, is_package: bool) -> list[str]:
        """Return the dotted names that a statement or call imports, as far as they are literal."""
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
        """Return the longest prefix of a dotted name that is a module of the package, as `a.b` for a name c in it."""
        while name.partition(".")[0] in self.packages:
            if name in self.files:
                return name
            name = name.rpartition(".")[0]
        return None

    def room(self, module: str) -> str:
        """Return the room of a module, as `attend.core` or `verdict.results`; a part itself is the room of its door."""
        package, *parts = module.split(".")
        if package == VERDICT:
            return ".".join(["verdict", *parts[:1]])
        return ".".join(parts[: 1 + (parts[0] in PARTS)]) if parts else package

    def purpose(self, room: str) -> str:
        """Return the first sentence of a room's module docstring."""
        path = next(path for module, path in self.files.items() if self.room(module) == room)
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        return " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")

    def floor(self, module: str) -> int | None:
        """Return the floor of a module, or None if its room is on none."""
        room = self.room(module)
        return next((i for i, rooms in enumerate(FLOORS) if room in rooms), None)

    def homeless(self) -> list[str]:
        """Return the files whose room is on no floor."""
        return [str(path) for module, path in self.files.items() if self.floor(module) is None]

    def upward(self) -> list[Arrow]:
        """Return the imports of modules on a higher floor."""
        floors = {module: floor for module in self.files if (floor := self.floor(module)) is not None}
        both = [a for a in self.arrows if a.importer in floors and a.imported in floors]
        return [arrow for arrow in both if floors[arrow.imported] > floors[arrow.importer]]

    def folder(self, module: str) -> str:
        """Return the folder of a module as a dotted name; a file directly in the package is a separate room."""
        beside = 2 if module.split(".")[1:2] and module.split(".")[1] in PARTS else 1
        is_room = self.files[module].name == "__init__.py" or module.count(".") == beside
        return module if is_room else module.rpartition(".")[0]

    def mutual(self) -> list[Arrow]:
        """Return the imports between folders, at any depth, that import each other."""
        by_pair: dict[tuple[str, str], list[Arrow]] = {}
        for arrow in self.arrows:
            pair = self.folder(arrow.importer), self.folder(arrow.imported)
            if pair[0] != pair[1]:
                by_pair.setdefault(pair, []).append(arrow)
        return [arrow for (a, b), arrows in by_pair.items() if (b, a) in by_pair for arrow in arrows]

    def part(self, module: str) -> str:
        """Return the part of a module: attend, health, lab, verdict, or "headwise" for other modules.

        It is "" for the ground and for what lists names for users. The command line belongs to the lab.
        """
        room = self.room(module)
        if room in ("files", "borders", "numerics", "headwise", "study", "report", "__main__"):
            return ""
        return "lab" if room == "cli" else part if (part := room.partition(".")[0]) in DOORS else "headwise"

    def past_doors(self) -> list[Arrow]:
        """Return the imports from one part into another that do not go through its door."""
        found = []
        for arrow in self.arrows:
            inside, outside = self.part(arrow.imported), self.part(arrow.importer)
            if inside in DOORS and outside not in ("", inside) and arrow.imported not in (DOORS[inside], *SIDE_DOORS):
                found.append(arrow)
        return found

    def door(self, module: str) -> list[str]:
        """Return the names that a door lists in a table of its modules."""
        tree = ast.parse(self.files[module].read_text(encoding="utf-8"))
        tables = [
            node.value for node in tree.body if isinstance(node, ast.Assign) and "_DOOR" in ast.unparse(node.targets[0])
        ]
        return [ast.literal_eval(key) for table in tables if isinstance(table, ast.Dict) for key in table.keys if key]

    def circles(self) -> list[Arrow]:
        """Return the imports that are part of a cycle of files."""
        imported: dict[str, set[str]] = {module: set() for module in self.files}
        for arrow in self.arrows:
            imported[arrow.importer].add(arrow.imported)
        reached = {module: _reach(module, imported) for module in imported}
        return [arrow for arrow in self.arrows if arrow.importer in reached[arrow.imported]]


def _module(path: Path, source: Path) -> str:
    parts = (source.name, *path.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _reach(start: str, imported: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [*imported[start]]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imported[module]
    return reached


def draw(house: House) -> str:
    """Return an SVG of the floors under a roof, the highest at the top, with each room's purpose and imports."""
    ground = ROOF + HIGH * (len(FLOORS) - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{ground + 58}" viewBox="0 0 {WIDE} '
        f'{ground + 58}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDE}" height="{ground + 58}" fill="#ffffff"/>',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="5" refY="5" markerWidth="5" markerHeight="5" orient="auto">'
        '<path d="M0 0 L10 5 L0 10 z" fill="#b4552d"/></marker></defs>',
        f'<polygon points="{LEFT - 12},{ROOF} {(LEFT + RIGHT) / 2:.0f},8 {RIGHT + 12},{ROOF}" fill="#efe3d6" '
        'stroke="#a98"/>',
        *_roof(),
    ]
    for level, rooms in enumerate(FLOORS[:-1]):
        parts += _floor(house, level, rooms, ground - HIGH * (level + 1))
    parts += [
        f'<line x1="{LEFT - 12}" y1="{ground + 4}" x2="{RIGHT + 12}" y2="{ground + 4}" stroke="#665544" '
        'stroke-width="4"/>',
        f'<path d="M{RIGHT + 32} {ROOF + 10} V{ground - 12}" stroke="#b4552d" stroke-width="3" '
        'marker-end="url(#head)"/>',
        f'<text transform="translate({RIGHT + 52} {(ROOF + ground) // 2}) rotate(90)" text-anchor="middle" '
        'font-size="15" '
        'fill="#b4552d">imports point down, or stay on the floor</text>',
        f'<rect x="{LEFT}" y="{ground + 22}" width="18" height="18" rx="4" fill="{OPEN}" stroke="#5a8f5a"/>',
        f'<text x="{LEFT + 26}" y="{ground + 36}" font-size="14" fill="#234">a room that grows: one new file, '
        "as its guide describes</text>",
    ]
    return "\n".join([*parts, "</svg>", ""])


def _roof() -> list[str]:
    middle = (LEFT + RIGHT) / 2
    lines = [(TITLES[-1], 17, "#432", ROOF - 44), (", ".join(FLOORS[-1]), 14, "#654", ROOF - 18)]
    return [
        f'<text x="{middle:.0f}" y="{y}" text-anchor="middle" font-size="{size}" '
        f'fill="{colour}">{html.escape(text)}</text>'
        for text, size, colour, y in lines
    ]


def _floor(house: House, level: int, rooms: tuple[str, ...], top: float) -> list[str]:
    band = "#f4f6f9" if level % 2 else "#e9edf3"
    elements = [
        f'<rect x="{LEFT - 6}" y="{top}" width="{RIGHT - LEFT + 12}" height="{HIGH}" fill="{band}"/>',
        f'<text x="12" y="{top + 42}" font-size="30" font-weight="bold" fill="#89a">{level}</text>',
    ]
    for number, line in enumerate(_wrapped(TITLES[level], 15)):
        elements.append(
            f'<text x="40" y="{top + 30 + 18 * number}" font-size="15" fill="#345">{html.escape(line)}</text>'
        )
    step = (RIGHT - LEFT) / len(rooms)
    for place, room in enumerate(rooms):
        elements += _room(house, room, LEFT + step * place + 5, top + 7, step - 10, HIGH - 14)
    return elements


def _room(house: House, room: str, x: float, y: float, width: float, height: float) -> list[str]:
    used = sorted({house.room(a.imported) for a in house.arrows if house.room(a.importer) == room} - {room})
    purpose = house.purpose(room).replace("`", "")
    name, _, description = purpose.partition(": ")
    # A room's docstring often begins with its name, which the picture already shows above it.
    purpose = description if description and len(name.split()) <= 3 else purpose
    texts = [
        (room, 18, "#123", "bold"),
        (purpose if purpose.startswith("headwise") else purpose[:1].upper() + purpose[1:], 13, "#234", "normal"),
        (f"uses {', '.join(used)}" if used else "uses no other room", 11, "#678", "normal"),
    ]
    fill, edge = (OPEN, "#5a8f5a") if room in GROWING else ("#ffffff", "#8aa")
    box = (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{fill}" '
        f'stroke="{edge}"/>'
    )
    elements, at = [box], y + 4
    for text, size, colour, weight in texts:
        for line in _wrapped(text, int((width - 16) / (0.48 * size))):
            at += size + 3
            elements.append(
                f'<text x="{x + 9:.0f}" y="{at:.0f}" font-size="{size}" font-weight="{weight}" fill="{colour}">'
                f"{html.escape(line)}</text>"
            )
    return elements


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main() -> int:
    """Write the picture, or with --check compare it with the code."""
    picture = draw(House())
    if "--check" in sys.argv:
        same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture
        print(
            "" if same else f"{PICTURE.name} does not match the code: run python docs/draw_house.py",
            end="" if same else "\n",
        )
        return 0 if same else 1
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
