"""The house: every file is on a floor, imports point down, and no files import each other in a cycle."""

import ast
import importlib
import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def plan():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "docs")
        import draw_house
    return draw_house


@pytest.fixture(scope="module")
def house(plan):
    return plan.House()


def test_every_file_stands_on_a_floor(house):
    assert not house.homeless()


def test_imports_point_down(house):
    wrong = house.upward()
    assert not wrong, "imports from a higher floor:\n" + "\n".join(map(str, wrong))


def test_no_files_import_each_other(house):
    wrong = house.circles()
    assert not wrong, "imports in a cycle:\n" + "\n".join(map(str, wrong))


def test_no_folders_import_each_other(house):
    wrong = house.mutual()
    assert not wrong, "imports between two folders in both directions:\n" + "\n".join(map(str, wrong))


def test_two_folders_that_import_each_other_are_found(plan, tmp_path):
    source = tmp_path / "src" / "tiny"
    for name in ("", "above", "above/inside"):
        (source / name).mkdir(parents=True, exist_ok=True)
        (source / name / "__init__.py").write_text("")
    (source / "above" / "a.py").write_text("from tiny.above.inside.b import x\n")
    (source / "above" / "c.py").write_text("x = 1\n")
    (source / "above" / "inside" / "b.py").write_text("from tiny.above.c import x\n")
    assert sorted(a.importer for a in plan.House(source).mutual()) == ["tiny.above.a", "tiny.above.inside.b"]
    assert not plan.House(source).circles()


def test_a_file_directly_in_the_package_is_a_room_of_its_own(plan, tmp_path):
    source = tmp_path / "src" / "tiny"
    (source / "core").mkdir(parents=True)
    (source / "__init__.py").write_text("from tiny.core.a import x\n")
    (source / "borders.py").write_text("x = 1\n")
    (source / "core" / "__init__.py").write_text("")
    (source / "core" / "a.py").write_text("from tiny.borders import x\n")
    assert not plan.House(source).mutual()
    (source / "borders.py").write_text("from tiny.core.b import x\n")
    (source / "core" / "b.py").write_text("x = 1\n")
    assert {a.importer for a in plan.House(source).mutual()} == {"tiny.core.a", "tiny.borders"}


def test_a_room_is_on_one_floor_and_exists(plan, house):
    rooms = [room for floor in plan.FLOORS for room in floor]
    assert len(rooms) == len(set(rooms))
    assert {house.room(module) for module in house.files} == set(rooms)


@pytest.mark.parametrize(
    "statement",
    [
        "from tiny.regularizing.handle import Handle",
        "if TYPE_CHECKING:\n    from tiny.regularizing.handle import Handle",
        "def f():\n    from tiny.regularizing import handle",
        "import tiny.regularizing.handle",
        "from ..regularizing import handle",
        "from .. import regularizing",
        "from tiny import regularizing",
        "x = importlib.import_module('tiny.regularizing.handle')",
        "import tiny",
    ],
)
def test_a_wrong_arrow_is_named_with_file_and_line(plan, tmp_path, statement):
    source = tmp_path / "src" / "tiny"
    for name in ("", "core", "regularizing"):
        (source / name).mkdir(parents=True, exist_ok=True)
        (source / name / "__init__.py").write_text("")
    (source / "regularizing" / "handle.py").write_text("Handle = 1\n")
    (source / "core" / "site.py").write_text(f"x = 1\n{statement}\n")
    plan.FLOORS, before = ((("core",), ("regularizing",), ("tiny",))), plan.FLOORS
    try:
        wrong = plan.House(source).upward()
    finally:
        plan.FLOORS = before
    line = 3 if "\n" in statement else 2
    assert [f"{a.file.as_posix()}:{a.line}" for a in wrong] == [f"src/tiny/core/site.py:{line}"]


def test_a_circle_of_three_is_found(plan, tmp_path):
    source = tmp_path / "src" / "tiny"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (source / f"{name}.py").write_text(f"def f():\n    from tiny.{other} import f\n")
    assert sorted(a.importer for a in plan.House(source).circles()) == ["tiny.a", "tiny.b", "tiny.c"]


@pytest.mark.parametrize(
    "door",
    [
        *("headwise.attend", "headwise.health", "headwise.lab", "headwise_verdict"),
        *("headwise_verdict.files", "headwise_verdict.pages", "headwise_verdict.results"),
    ],
)
def test_a_door_is_narrow_and_every_name_in_it_exists(plan, house, door):
    assert door in (*plan.DOORS.values(), *plan.SIDE_DOORS)
    names = house.door(door)
    module = importlib.import_module(door)
    assert 0 < len(names) <= plan.WIDEST and sorted(names) == module.__all__
    # each name with one line of what it is for
    text = house.files[door].read_text(encoding="utf-8")
    assert [name for name in names if not re.search(rf'^    # \S[^\n]*\n    "{name}": ', text, re.MULTILINE)] == []
    # what type checkers see
    tree = ast.parse(text)
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert sorted(alias.asname for found in guarded.body for alias in found.names) == sorted(names)
    assert all(getattr(module, name).__name__ == name for name in names if callable(getattr(module, name)))


@pytest.mark.parametrize("room", ["core", "projections", "hosts", "optimizers"])
def test_a_side_door_is_narrow_and_every_name_in_it_exists(plan, room):
    assert f"headwise.attend.{room}" in plan.SIDE_DOORS
    module = importlib.import_module(f"headwise.attend.{room}")
    assert 0 < len(module.__all__) <= plan.WIDEST
    assert all(hasattr(module, name) for name in module.__all__)


def test_no_import_goes_past_a_door_but_those_that_are_counted(plan, house):
    found = {}
    for arrow in house.past_doors():
        found.setdefault((house.part(arrow.importer), house.part(arrow.imported)), []).append(arrow)
    for pair in found.keys() | plan.PAST.keys():
        arrows, counted = found.get(pair, []), plan.PAST.get(pair, (0, ""))[0]
        way = f"{pair[0]} takes from {pair[1]} past its door ({plan.DOORS[pair[1]]})"
        assert len(arrows) <= counted, f"{way} {len(arrows)} times, not {counted}:\n" + "\n".join(map(str, arrows))
        assert len(arrows) == counted, f"{way} only {len(arrows)} times: lower the number in docs/draw_house.py"


def test_an_import_past_a_door_is_named_and_one_through_it_is_not(plan, tmp_path):
    source = tmp_path / "src" / "headwise"
    for name in ("", "attend", "attend/core", "health"):
        (source / name).mkdir(parents=True, exist_ok=True)
        (source / name / "__init__.py").write_text("")
    (source / "attend" / "core" / "site.py").write_text("Site = 1\n")
    (source / "health" / "a.py").write_text("from headwise.attend import Site\n")
    (source / "health" / "b.py").write_text("x = 1\nfrom headwise.attend.core.site import Site\n")
    (wrong,) = plan.House(source).past_doors()
    assert str(wrong) == "src/headwise/health/b.py:2: headwise.health.b imports headwise.attend.core.site"


def test_a_call_stands_below_the_methods_whose_stages_name_it(house):
    arrows = {(arrow.importer, arrow.imported) for arrow in house.arrows}
    assert ("headwise.attend.core.method", "headwise.attend.core.call") in arrows
    assert ("headwise.attend.core.call", "headwise.attend.core.method") not in arrows


def test_logits_are_capped_in_one_place(plan):
    capping = [
        path.name
        for source in plan.SOURCES
        for path in source.rglob("*.py")
        if re.search(r"softcap\)?\W+(torch\.)?tanh", path.read_text())
    ]
    assert capping == ["masked.py"]


def test_one_class_stands_in_an_attention_layer(plan):
    attending = [
        path.name
        for source in plan.SOURCES
        for path in source.rglob("*.py")
        if re.search(r"original: Callable.*\n(?:.*\n){0,8}? +need_weights: bool = False,\n", path.read_text())
    ]
    assert attending == ["fitted_layer.py"]


def test_the_picture_says_of_every_file_more_than_its_class(plan, house):
    entries = re.findall(r"<li><code>([^<]+\.py)</code> (.*)</li>", plan.draw(house))
    assert len(entries) > 300
    assert [file for file, sentence in entries if " " not in sentence] == []
    assert dict(entries)["drop_head.py"].startswith("DropHead. Drops whole heads")


def test_every_door_and_every_file_is_on_the_page(plan, house):
    page = plan.draw(house)
    for part, module in plan.DOORS.items():
        bar = page.split(f'<details class="{part}"')[1].split("</summary>")[0]
        names = house.door(module)
        assert [name for name in names if f"<code>{name}</code>" not in bar] == []
        # each with the comment above it in the door
        assert house.door_lines(module).keys() == {*names}
    shown = {name.rpartition("/")[2] for name in re.findall(r"<code>([\w/]+)\.py</code>", page)}
    rooms = {room.rpartition(".")[2] for floor in plan.FLOORS for room in floor}
    files = {path.stem for path in house.files.values()}
    assert files - shown - rooms == {"__init__"}


def test_the_page_is_what_the_code_gives(plan, house):
    assert plan.PICTURE.read_text(encoding="utf-8") == plan.draw(house), "run python docs/draw_house.py"


@pytest.mark.parametrize("word", ["nhead", "n_kv_heads", "dim_head", "q_lin", "q_norm"])
def test_names_by_which_models_keep_heads_and_projections_stand_once(plan, word):
    holding = [
        path.name
        for source in plan.SOURCES
        for path in source.rglob("*.py")
        if f'"{word}"' in path.read_text(encoding="utf-8")
    ]
    assert holding == ["names.py"]


# Names of classes that stand in more than one file of a distribution, and why. A name that goes, goes from here.
OF_SEVERAL_CLASSES = {
    "HeadwiseCallback": "what each trainer's users import: transformers', Lightning's, and a study's script",
    "SpectralNorm": "a method, and the statistic that it limits",
    "ValueNorm": "a method, and the statistic of what it normalises",
}


@pytest.mark.parametrize("source", ["src/headwise", "verdict/src/headwise_verdict", "papers/src/headwise_papers"])
def test_no_class_name_has_two_meanings_in_a_distribution(plan, source):
    files: dict[str, set[str]] = {}
    for path in (plan.ROOT / source).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, set()).add(f"{path.relative_to(plan.ROOT)}:{node.lineno}")
    twice = {name: sorted(places) for name, places in files.items() if len(places) > 1}
    known = OF_SEVERAL_CLASSES if source == "src/headwise" else {}
    assert twice.keys() - known.keys() == set(), {name: twice[name] for name in twice.keys() - known.keys()}
    assert known.keys() <= twice.keys(), f"stands once now: {known.keys() - twice.keys()}"
