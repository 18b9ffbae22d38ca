"""Check the floors of the code against its imports and write the page of the house: `docs/draw_house.py [--check]`.

A room is a folder or file directly in `src/headwise`, in one of its parts `attend`, `health` and `lab`, or in
`verdict/src/headwise_verdict`. A file may import from its own floor and from lower ones. Imports
for types, imports inside functions and modules named in `import_module` count like any other.
"""

from __future__ import annotations

import ast
import csv
import html
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "src" / "headwise", ROOT / "verdict" / "src" / "headwise_verdict")
PICTURE, FLOW = ROOT / "docs" / "house.md", ROOT / "docs" / "flow.csv"

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
# Rooms that are doors of their part too: their `__all__` lists what other parts take of the vocabulary of methods, of
# weights, layers and optimizers, and of the files and records that verdict reads and others write.
SIDE_DOORS = (
    "headwise.attend.core",
    "headwise.attend.projections",
    "headwise.attend.hosts",
    "headwise.attend.optimizers",
    "headwise_verdict.files",
    "headwise_verdict.pages",
    "headwise_verdict.results",
)
# The largest number of names through a door.
WIDEST = 15
# Imports past a door, from a part into another: as many as there are, and why. None may join them; where one goes, the
# number goes down.
PAST: dict[tuple[str, str], tuple[int, str]] = {}

PAGE = """# The house

Each bar is a room of the code: what it is for, which rooms it uses, and the names on its door, through which others use
it. Open a bar to see its floors, and a floor's rooms to see their files. Imports point down or stay on their floor;
`tests/test_house.py` names every import that does not. [Design](design.md) says why.

<div class="house">
<details class="roof" id="roof"><summary><b>roof</b> The names that users import.</summary>
{roof}
</details>
{papers}
{parts}
<details class="ground" id="ground"><summary><b>ground</b> What every room of headwise may use.</summary>
{ground}
</details>
</div>

## How far one call goes
`python docs/flow.py` runs each way at toy size and counts the files whose functions are entered. A test holds
limits that may only fall. The aim: 3 rooms for each way, 12 files for a forward.

| way | rooms with a door | files | folders |
|---|---|---|---|
{flow}

`python docs/draw_house.py` writes this page from the code.
"""


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
        text = _sentence(next(path for module, path in self.files.items() if self.room(module) == room)).rstrip(".")
        # a docstring often begins with the name of its room, which stands next to it
        name, _, description = text.partition(": ")
        text = description if description and len(name.split()) <= 3 else text
        return text[:1].upper() + text[1:]

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
        return self.part_of(self.room(module))

    def part_of(self, room: str) -> str:
        """Return the part of a room."""
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

    def door_lines(self, module: str) -> dict[str, str]:
        """Return the names that a door lists, each with the comment above it."""
        text = self.files[module].read_text(encoding="utf-8").partition("_DOOR = {")[2]
        return {name: line for line, name in re.findall(r"# (.+)\n +\"(\w+)\":", text)}

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
    """Return the page of the house: a fold for each part, its door in the fold's line, its floors and files inside."""
    parts = "\n".join(_part(house, part) for part in ("lab", "health", "attend", "verdict"))
    roof = "\n".join(_room(house, room) for room in FLOORS[-1] if room != "__main__")
    ground = _floor(house, next(level for level, rooms in enumerate(FLOORS) if "borders" in rooms))
    return PAGE.format(roof=roof, papers=_papers(house), parts=parts, ground=ground, flow=_flow())


def _part(house: House, part: str) -> str:
    """Return the fold of a part, its floors from the highest down."""
    used = {house.part(a.imported) for a in house.arrows if house.part(a.importer) == part} & DOORS.keys() - {part}
    uses = f"Uses {', '.join(sorted(used))}." if used else "Uses no other room."
    door = house.door_lines(DOORS[part])
    names = " ".join(f"<code>{name}</code>" for name in door)
    rows = [f"<li><code>{name}</code> {_text(line)}</li>" for name, line in door.items()]
    levels = [level for level, rooms in enumerate(FLOORS) if house.part_of(rooms[-1]) == part]
    floors = "\n".join(_floor(house, level) for level in reversed(levels))
    return (
        f'<details class="{part}" id="{part}"><summary><b>{part}</b> {_text(house.purpose(part))}. {uses}<br>'
        f"<small>Its door:</small> {names}</summary>\n<p>What each name of the door is:</p>\n<ul>\n"
        + "\n".join(rows)
        + f"\n</ul>\n{floors}\n</details>"
    )


def _floor(house: House, level: int) -> str:
    rooms = [room for room in FLOORS[level] if room not in DOORS]
    folds = "\n".join(_room(house, room) for room in rooms)
    return f"<p><b>Floor {level}</b>: {_text(TITLES[level].partition(': ')[2] or TITLES[level])}</p>\n{folds}"


def _room(house: House, room: str) -> str:
    """Return a room's fold with a line for each of its files."""
    used = sorted({house.room(a.imported) for a in house.arrows if house.room(a.importer) == room} - {room})
    grows = " <em>grows: one new file, as its guide describes</em>" if room in GROWING else ""
    files = {module: path for module, path in house.files.items() if house.room(module) == room}
    base = min(files, key=len)
    return _fold(room, house.purpose(room) + ".", f"{grows} Uses {', '.join(used) or 'no other room'}.", base, files)


def _fold(name: str, purpose: str, more: str, base: str, files: dict[str, Path]) -> str:
    """Return a fold of files, each with the first sentence of its docstring, below the name of their folder."""
    lines = [
        f"<li><code>{module.removeprefix(base).lstrip('.').replace('.', '/')}.py</code> {_text(_sentence(path))}</li>"
        for module, path in files.items()
        if module != base and path.name != "__init__.py"
    ]
    title = f"<code>{name}</code> {_text(purpose)}" + (f"<small>{more}</small>" if more else "")
    if not lines:
        return f'<p class="room">{title}</p>'
    return f"<details><summary>{title}</summary>\n<ul>\n" + "\n".join(lines) + "\n</ul>\n</details>"


def _papers(house: House) -> str:
    """Return the fold of the distribution next to the house, which headwise finds by its entry points."""
    project = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]
    commands = " ".join(f"<code>headwise {name}</code>" for name in points["headwise.commands"])
    source = ROOT / "papers" / "src" / "headwise_papers"
    own = House(source)
    folders = sorted(path for path in source.iterdir() if (path / "__init__.py").exists())
    folds = []
    for folder in folders:
        base = f"headwise_papers.{folder.name}"
        files = {module: path for module, path in own.files.items() if module.startswith(f"{base}.")}
        folds.append(_fold(folder.name, _sentence(folder / "__init__.py"), "", base, files))
    files = {module: path for module, path in own.files.items() if module.count(".") == 1}
    folds.append(_fold("*.py", "Studies of one file.", "", "headwise_papers", files))
    return (
        '<details class="papers" id="papers"><summary><b>papers</b> next to the house: '
        f"{_text(project['description'])} Uses every room, and no room imports it.<br><small>Its door:</small> "
        f"<code>{len(points['headwise.studies'])} studies</code> {commands}</summary>\n"
        + "\n".join(folds)
        + "\n</details>"
    )


def _flow() -> str:
    """Return the kept counts of docs/flow.py as a table."""
    with FLOW.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return "\n".join(f"| {r['way']} | {r['rooms'].replace(' ', ', ')} | {r['files']} | {r['folders']} |" for r in rows)


def _sentence(path: Path) -> str:
    """Return what a file is for; where its docstring only names its class, the class's own first sentence follows."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text = _first_sentence(ast.get_docstring(tree) or "")
    named = [node for node in tree.body if isinstance(node, ast.ClassDef) and text == f"{node.name}."]
    return " ".join([text, *(_first_sentence(ast.get_docstring(node) or "") for node in named)])


def _first_sentence(docstring: str) -> str:
    text = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.?])(?<!\bal\.)(?<!\be\.g\.) ", f"{text.rstrip('.')}." if text[-1:] != "?" else text)[0]


def _text(text: str) -> str:
    """Return a docstring's text as HTML, its `names` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def main() -> int:
    """Write the page, or with --check compare it with the code."""
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
