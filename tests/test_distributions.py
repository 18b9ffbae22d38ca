"""What each distribution does where the others are not installed, and what two of them hold twice."""

import ast
from pathlib import Path

import pytest
from absent_libraries import in_new_process, run_without

from headwise.health.statistics import STATISTICS
from headwise_verdict.reporting.health_section import UNITS

ROOT = Path(__file__).parents[1]
# headwise needs nothing of headwise-verdict, which needs nothing of headwise: these few lines stand in both.
TWICE = {
    ("headwise/files/durable.py", "headwise_verdict/files/durable.py"): (
        "open_to_append append write_all writing write_bytes write_json as_line append_lines _line_end finite "
        "_flush_folder"
    ),
    ("headwise/files/ownership.py", "headwise_verdict/files/ownership.py"): "claim why_foreign owned",
    ("headwise/health/health_records.py", "headwise_verdict/results/health_records.py"): (
        "Record Alert alerts_among figures_among"
    ),
    ("headwise/files/errors.py", "headwise_verdict/files/errors.py"): "suggest",
}


def test_a_verdict_needs_neither_torch_nor_headwise(tmp_path):
    rows = [f"{arm},{seed},{3 + seed / 100 - 0.1 * (arm == 'new')}" for arm in ("main", "new") for seed in range(8)]
    (tmp_path / "runs.csv").write_text("\n".join(["arm,seed,loss", *rows]))
    code = f"""
import importlib, os, pathlib, pkgutil, headwise_verdict
os.chdir({str(tmp_path)!r})
for one in pkgutil.walk_packages(headwise_verdict.__path__, "headwise_verdict."):
    importlib.import_module(one.name)
print(headwise_verdict.judge([(3.11, 3.2), (3.13, 3.21), (3.09, 3.19), (3.12, 3.2), (3.1, 3.19)]).answer)
from headwise_verdict.reporting.command import report_numbers
print(report_numbers(pathlib.Path("runs.csv"), ["loss:lower"], "main"))
print(headwise_verdict.write("runs-report"))
assert "torch" not in sys.modules
"""
    # not torch: scipy asks sys.modules for it
    done = in_new_process({"headwise", "headwise_papers"}, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accept\n") and "new" in done.stdout
    assert done.stdout.endswith("runs-report/report.html\nruns-report/report.html\n")


def test_headwise_verdict_judges_by_its_own_command(tmp_path):
    rows = [f"{arm},{seed},{3 + seed / 100 - 0.1 * (arm == 'new')}" for arm in ("main", "new") for seed in range(8)]
    (tmp_path / "runs.csv").write_text("\n".join(["arm,seed,loss", *rows]))
    for given, status, text in (
        (
            [str(tmp_path / "runs.csv"), "--metric", "loss:lower", "--candidate", "new", "--baseline", "main"],
            0,
            "accept",
        ),
        (["--metric", "loss:lower", "--script", "python train.py", "--change", "lr=1"], 5, "--script needs headwise"),
        (["--margin", "a"], 5, "--margin"),
    ):
        code = f"""
sys.argv = ["headwise-verdict", "judge", *{given!r}]
import headwise_verdict.cli
# as where nothing that runs scripts is installed
headwise_verdict.judging.command.SCRIPTS = "headwise_verdict.none"
try:
    headwise_verdict.cli.main()
finally:
    assert "torch" not in sys.modules
"""
        done = in_new_process({"headwise", "headwise_papers"}, code)
        assert done.returncode == status and text in done.stdout + done.stderr, done


def test_attention_and_health_need_no_verdict(tmp_path):
    code = f"""
import torch
from torch import nn
from headwise import *
import headwise.testing
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)
handle = regularize(model, DropHead(p=0.5))
looked = watch(model, every=1, on_alert=None)
model(torch.randn(2, 5, 16)).sum().backward()
looked.step()
assert looked.records() and handle._repr_html_() and looked._repr_html_()
looked.remove()
handle.remove()
headwise.testing.check_method
page, _ = audit(model).write({str(tmp_path / "audit.md")!r})
print(page.read_text().splitlines()[0])
"""
    done = run_without({"headwise_verdict", "pydantic", "jinja2", "altair"}, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "# Audit of TransformerEncoder\n"


@pytest.mark.parametrize(
    "name", ["headwise.judge", "headwise.run", "headwise.study.Task", "headwise.testing.assert_not_worse"]
)
def test_without_a_verdict_an_error_names_the_extra(name):
    module, _, attribute = name.rpartition(".")
    done = run_without({"headwise_verdict"}, f"from {module} import {attribute}")
    assert "needs headwise_verdict" in done.stderr and "pip install 'headwise[study]'" in done.stderr, done.stderr


@pytest.mark.parametrize("pair", TWICE, ids=lambda pair: Path(pair[0]).stem)
def test_what_stands_twice_is_the_same(pair):
    def sources(place):
        folder = ROOT / "verdict" / "src" if place.startswith("headwise_verdict") else ROOT / "src"
        tree = ast.parse((folder / place).read_text(encoding="utf-8"))
        return {node.name: ast.unparse(node) for node in tree.body if hasattr(node, "name")}

    first, second = map(sources, pair)
    for name in TWICE[pair].split():
        # where no study is, its error is none
        assert first[name] == second[name].replace("StudyError", "ValueError"), name


def test_reports_know_the_units_of_all_statistics():
    assert {name: statistic.unit for name, statistic in STATISTICS.items()} == UNITS
