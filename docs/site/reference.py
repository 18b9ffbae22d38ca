"""Write the pages of the reference: public names and statistics from their docstrings, and the command line from its
own help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import method_contract
import statistics_page

import headwise
import headwise.report
import headwise.study
import headwise.testing
from headwise.attend import methods
from headwise.testing import contract

COMMANDS = ((), ("compare",), ("report",), ("audit",), ("methods",))
# objects behind the public names that authors of methods and statistics, or readers of reports, encounter
INNER = {
    "Returned by `regularize` and `watch`": (
        "headwise.Regularized",
        "headwise.Site",
        "headwise.health.watching.watch.Watch",
        "headwise.attend.regularizing.coverage.Coverage",
        "headwise.attend.regularizing.ablation.Ablation",
    ),
    "Returned by `audit`, `compress`, `importance` and `sharpness`": (
        "headwise.health.auditing.audited.Audit",
        "headwise.attend.compressing.record.Compressed",
        "headwise.attend.regularizing.importance.Importance",
        "headwise.health.statistics.sharpness.Sharpness",
    ),
    "Returned by `run` and `compare`": (
        "headwise.Run",
        "headwise.StudyReport",
        "headwise.StudyResult",
        "headwise.lab.training.fit.PlainHandle",
        "headwise_verdict.results.analysis_record.Analysis",
    ),
    "Returned by `check_method`": ("headwise.testing.contract.Checked",),
    "Used by authors of methods": ("headwise.attend.core.call.Call", "headwise.attend.core.method_state.MethodState"),
}

# Modules for another library's trainer, which is mocked during the build.
TRAINERS = {"lightning": ("HeadwiseCallback",), "axolotl": ("HeadwisePlugin", "HeadwiseSection")}


def write(folder: Path) -> None:
    """Write the pages of the reference into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = {path.removeprefix("headwise.") for paths in INNER.values() for path in paths}
    elsewhere = {*methods.__all__, *inner, "Method", "__version__"}
    # dir() also lists the names that need an optional library
    names = {*dir(headwise), *headwise.__all__} - elsewhere
    _put(folder / "headwise.md", _page("headwise", "headwise", sorted(names, key=str.lower), METHODS))
    _put(folder / "study.md", _page("headwise.study", "headwise.study", sorted(headwise.study.__all__, key=str.lower)))
    _put(folder / "report.md", _page("headwise.report", "headwise.report", headwise.report.__all__))
    for module, classes in TRAINERS.items():
        entries = ["\n".join(["```{eval-rst}", f".. autoclass:: headwise.{module}.{name}", "```"]) for name in classes]
        _put(folder / f"{module}.md", "\n\n".join([f"# headwise.{module}", *entries]) + "\n")
    _put(folder / "testing.md", _page("headwise.testing", "headwise.testing", headwise.testing.__all__, _checks()))
    _put(folder / "own_method.md", _own_method())
    _put(folder / "objects.md", _objects())
    _put(folder / "statistics.md", statistics_page.page())
    _put(folder / "command_line.md", _command_line())
    toctree = "\n".join(
        [
            "```{toctree}",
            "headwise",
            "study",
            "report",
            "lightning",
            "axolotl",
            "own_method",
            "testing",
            "objects",
            "statistics",
            "command_line",
            "```",
        ]
    )
    _put(folder / "index.md", f"# Reference\n\nEvery public name, from its docstring.\n\n{toctree}\n")


METHODS = (
    "Also public names of this module: the methods, each with [its own page](../methods/index.md); "
    "`Method`, from which [your own methods](own_method.md) derive; and [the objects that they return](objects.md)."
)

OWN_METHOD = (
    "What a subclass of `headwise.Method` may set and override. A stage that is not overridden does "
    "not exist for the "
    "core. Shapes: B batch, H query heads, T queries, N keys, D head size, C hidden size."
)


def _page(title: str, module: str, names: list[str], intro: str = "") -> str:
    return (
        "\n\n".join([f"# {title}", *([intro] if intro else []), *(_entry(f"{module}.{name}") for name in names)]) + "\n"
    )


def _checks() -> str:
    """Return the table of the checks that `check_method` runs."""
    every = (*contract.OF_SETTINGS, *contract.OF_CALLS, *contract.OF_MODELS)
    rows = [f"| `{check.__name__}` | {(check.__doc__ or '').removeprefix('Check ').split('.')[0]} |" for check in every]
    return "\n".join(["| check | what must hold |", "|---|---|", *rows])


def _own_method() -> str:
    """Return the page of the members that subclasses of `Method` define: only type checkers see the stages, so autodoc
    does not."""
    parts = ["# Method: its class variables and stages", OWN_METHOD]
    parts += [_entry("headwise.Method"), "## Class variables"]
    for name, (default, text) in method_contract.class_variables().items():
        parts.append(f"### `{name}`\n\nDefault: `{default}`. {text}")
    parts.append("## Stages")
    for name, (signature, text) in method_contract.stages().items():
        parts.append(f"### `{name}`\n\n```python\n{signature}\n```\n\n{text}")
    return "\n\n".join(parts) + "\n"


def _objects() -> str:
    parts = ["# Objects that calls return", "You do not build these yourself: other calls return them."]
    for title, names in INNER.items():
        parts += [f"## {title}", *(_entry(name) for name in names)]
    return "\n\n".join(parts) + "\n"


def _entry(path: str) -> str:
    module, _, name = path.rpartition(".")
    found = getattr(__import__(module, fromlist=[name]), name)
    kind, options = ("autoclass", ["   :members:"]) if isinstance(found, type) else ("autofunction", [])
    if isinstance(found, type) and issubclass(found, Exception):
        kind = "autoexception"
    return "\n".join(["```{eval-rst}", f".. {kind}:: {path}", *options, "```"])


def _command_line() -> str:
    parts = ["# The command line", "The output of `--help` for `headwise` and its commands."]
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "headwise", *command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"},
        )
        parts += [f"## `{' '.join(('headwise', *command))}`", f"```text\n{done.stdout.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _put(path: Path, text: str) -> None:
    # an unchanged file keeps its modification time, so that its page is not built again
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
