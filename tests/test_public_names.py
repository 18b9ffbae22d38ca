"""The public names: for type checkers and star imports, and the extra that installs a missing library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from absent_libraries import in_new_process, run_without

import headwise
import headwise.study

SOURCE = Path(headwise.__file__).parent


def declared_names(path: Path) -> set[str]:
    """Return the names that the file imports under TYPE_CHECKING, and those of the room that it imports completely."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (guarded,) = [n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    imports = [found for found in guarded.body if isinstance(found, ast.ImportFrom)]
    whole = [found.module for found in imports if found.names[0].name == "*"]
    assert set(whole) <= {"headwise.attend.methods"}
    names = {alias.asname for found in imports if found.module not in whole for alias in found.names}
    return names | (exported_methods().keys() if whole else set())


def exported_methods() -> dict[str, str]:
    """Return the names that the room of methods exports by an import, `as` the same name, each with its module."""
    tree = ast.parse((SOURCE / "attend" / "methods" / "__init__.py").read_text(encoding="utf-8"))
    imports = [found for found in tree.body if isinstance(found, ast.ImportFrom)]
    return {a.asname: f"{found.module}" for found in imports for a in found.names if a.asname == a.name}


def test_type_checkers_see_exactly_the_public_names() -> None:
    optional = {
        "HeadwiseCallback",
        "Run",
        "StudyReport",
        "alarms",
        "StudyResult",
        "WatchCallback",
        "compare",
        "judge",
        "run",
    }
    assert declared_names(SOURCE / "__init__.py") == {*headwise.__all__} - {"__version__"} | optional
    assert {*headwise.__all__} | optional == {*dir(headwise)}
    assert declared_names(SOURCE / "study.py") == {*headwise.study.__all__}


def test_every_method_is_public_and_every_public_name_exists() -> None:
    from headwise.attend import methods

    assert {*methods.__all__} <= {*headwise.__all__}
    assert all(getattr(headwise, name) is not None for name in headwise.__all__)


def test_every_class_in_the_room_of_methods_has_its_line() -> None:
    from headwise.attend import methods

    written = {
        node.name: f"headwise.attend.methods.{path.stem}"
        for path in (SOURCE / "attend" / "methods").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and "Method" in map(ast.unparse, node.bases)
    }
    assert written == exported_methods()
    assert sorted(written) == methods.__all__


def test_a_folder_is_looked_for_without_torch() -> None:
    code = (
        "import sys\nfrom headwise import attend, files\nassert not hasattr(sys.modules['headwise'], "
        "'nothing')\nprint('torch' in sys.modules)"
    )
    assert in_new_process(set(), code).stdout == "False\n"


def test_python_says_which_name_was_meant() -> None:
    done = run_without(set(), "import headwise\nheadwise.DropHed")
    assert "has no attribute 'DropHed'. Did you mean 'DropHead'?" in done.stderr, done.stderr


def test_a_star_import_needs_nothing_but_torch() -> None:
    optional = {
        "transformers",
        "timm",
        "tensorboard",
        "pydantic",
        "numpy",
        "scipy",
        "jinja2",
        "altair",
        "safetensors",
        "typer",
    }
    done = in_new_process(optional, "from headwise import *\nprint(regularize.__name__, DropHead(p=0.1), audit, watch)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("regularize DropHead(p=0.1) <function audit")


def test_comparing_is_a_function() -> None:
    done = run_without(
        set(),
        "import headwise.lab.comparing.compare\nfrom headwise.study import compare\nprint(type(compare).__name__)",
    )
    assert done.stdout == "function\n", done.stderr


@pytest.mark.parametrize(
    ("name", "library"),
    [("Task", "pydantic"), pytest.param("Study", "pydantic", marks=pytest.mark.grid), ("compare", "filelock")],
)
def test_a_missing_library_of_studies_is_named_with_its_extra(name: str, library: str) -> None:
    done = run_without({library}, f"from headwise.study import {name}")
    message = (
        f"ImportError: headwise.study.{name} needs {library}, which is not installed: pip install 'headwise[study]'."
    )
    assert message in done.stderr


RIGHT = """
import torch

import headwise
from headwise import *
from headwise.study import Study, Task, compare

model = torch.nn.Linear(1, 1)
fitted: Regularized = headwise.regularize(
    model, NeuTRENO(strength=0.6), DropHead(p=VShape(start=0.2, end=0.2, warmup=5, total=10)), seed=3
)
optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, weight_decay=0.1))
watching = watch(model, every=2)
print(fitted.report(), watching.records(), parse("DropHead(p=0.1)"), compare, Study, Task, Site, Method)
"""
WRONG = """
from headwise import DropHead, NeuTRENO

DropHead(q=3)
NeuTRENO(strenth=1)
"""


@pytest.fixture
def two_programs(tmp_path: Path) -> Path:
    (tmp_path / "right.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    return tmp_path


def lines_with_errors(output: str) -> set[tuple[str, str]]:
    """Return file name and line of each error that a type checker printed."""
    errors = [line.strip() for line in output.splitlines() if " error: " in line]
    return {(Path(line.split(":")[0]).name, line.split(":")[1]) for line in errors}


WANTED = {("wrong.py", "4"), ("wrong.py", "5")}


@pytest.mark.slow
@pytest.mark.grid
def test_mypy_refuses_unknown_settings_and_takes_right_calls(two_programs: Path) -> None:
    pytest.importorskip("mypy")
    # Libraries are treated as Any: reading torch alone takes a minute.
    (two_programs / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {SOURCE.parent}\ncache_dir = {two_programs / 'cache'}\nfollow_imports = silent\n"
        "ignore_missing_imports = true\n[mypy-torch.*,transformers.*,numpy.*,pydantic.*,scipy.*]\nfollow_imports = "
        "skip\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "right.py", "wrong.py"],
        cwd=two_programs,
        capture_output=True,
        text=True,
        check=False,
    )
    assert lines_with_errors(done.stdout) == WANTED, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.grid
def test_pyright_refuses_unknown_settings_and_takes_right_calls(two_programs: Path) -> None:
    pytest.importorskip("pyright")
    (two_programs / "pyrightconfig.json").write_text(
        f'{{"include": ["."], "extraPaths": ["{SOURCE.parent}"], "reportWildcardImportFromLibrary": false}}'
    )
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
        cwd=two_programs,
        capture_output=True,
        text=True,
        check=False,
    )
    assert lines_with_errors(done.stdout.replace(" - error: ", " error: ")) == WANTED, done.stdout + done.stderr
