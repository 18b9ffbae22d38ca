"""One command keeps a study's results: the page, the analysis and the table, with how to repeat them."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_study import write_study

import headwise.comparing.report

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "docs" / "keep_results.py"


def keep(folder, kept, *more):
    command = [sys.executable, str(COMMAND), str(folder), str(kept), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_study_is_kept_with_its_figures_and_how_to_repeat_it(tmp_path):
    arms = ("baseline", "DropHead(p=0.2)", "baseline | learning_rate=0.01")
    folder = write_study(tmp_path / "study", methods=arms, effects=(0.0, 0.05, 0.0), seeds=10, diverged={(arms[2], 1)})
    headwise.comparing.report.write(folder)
    done = keep(folder, tmp_path / "kept", "--note", "What is to be said.")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["README.md", "analysis.json", "table.csv"]
    page = (tmp_path / "kept" / "README.md").read_text(encoding="utf-8")
    analysis = json.loads((tmp_path / "kept" / "analysis.json").read_text())
    row = next(line for line in page.splitlines() if line.startswith("| `DropHead(p=0.2)`"))
    arm = analysis["arms"][1]
    assert f"{100 * arm['metrics']['test/accuracy']['mean']:.2f} [" in row
    assert f"+{100 * arm['differences']['test/accuracy']['mean']:.2f} [" in row
    assert "better" in row
    assert analysis["answer"] in page and "What is to be said." in page
    # a bar in an arm's text would end the cell
    assert "| `baseline \\| learning_rate=0.01` | 1 of 10 |" in page
    study = json.loads((folder / "study.json").read_text())
    assert f"Hardware: {study['hardware']['processor']}, {study['hardware']['cores']} cores." in page
    for name, version in study["versions"].items():
        assert f"{name} {version}" in page


def test_the_course_along_an_axis_is_kept(tmp_path):
    arms = ("baseline", "DropHead(p=0.1)", "DropHead(p=0.2)")
    axes = [("p", (0.0, 0.1, 0.2), arms)]
    folder = write_study(tmp_path / "study", methods=arms, effects=(0.0, 0.05, 0.1), seeds=10, axes=axes)
    headwise.comparing.report.write(folder)
    page = runpy.run_path(str(COMMAND))["study_page"](folder)
    row = next(line for line in page.splitlines() if line.startswith("| p | test accuracy |"))
    assert row.endswith("| 0.2 (at an end) |")
    assert float(row.split("|")[3].split()[0]) == pytest.approx(5.0, abs=0.5)


def test_findings_are_kept_with_their_tables(tmp_path):
    (tmp_path / "found").mkdir()
    shutil.copy(ROOT / "docs" / "results" / "low-rank-toy" / "findings.json", tmp_path / "found")
    assert keep(tmp_path / "found", tmp_path / "kept").returncode == 0
    stored = json.loads((tmp_path / "kept" / "findings.json").read_text())
    page = (tmp_path / "kept" / "README.md").read_text(encoding="utf-8")
    assert all(paragraph in page for paragraph in stored["paragraphs"])
    assert page.count("\n|---") + page.count("\n| ---") == len(stored["tables"])


def test_a_folder_without_results_is_refused_and_nothing_is_written(tmp_path):
    done = keep(tmp_path, tmp_path / "kept")
    assert done.returncode == 1 and "holds neither analysis.json nor findings.json" in done.stderr
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("missing", ["versions", "hardware", "commit"])
def test_what_is_unknown_is_said_to_be(tmp_path, missing):
    folder = write_study(tmp_path / "study", methods=("baseline", "QKNorm()"), effects=(0.0, 0.0), seeds=3)
    headwise.comparing.report.write(folder)
    study = json.loads((folder / "study.json").read_text())
    study.pop(missing, None)
    (folder / "study.json").write_text(json.dumps(study))
    assert "unknown" in runpy.run_path(str(COMMAND))["study_page"](folder)
