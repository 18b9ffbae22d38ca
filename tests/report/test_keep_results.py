"""One command keeps a study's results: the page, the analysis and the table, with how to repeat them."""

import csv
import json
import runpy
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from report.synthetic_study import write_study

import headwise_verdict.reporting
from headwise_verdict.results.folder import read_study
from headwise_verdict.results.stored import checked_analysis

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "docs" / "keep_results.py"
# a script finds those beside it; runpy does not say where it runs from
sys.path.insert(0, str(COMMAND.parent))


def keep(folder, kept, *more):
    command = [sys.executable, str(COMMAND), str(folder), str(kept), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_study_is_kept_with_its_figures_and_how_to_repeat_it(tmp_path):
    arms = ("baseline", "DropHead(p=0.2)", "baseline | learning_rate=0.01")
    folder = write_study(tmp_path / "study", methods=arms, effects=(0.0, 0.05, 0.0), seeds=10, diverged={(arms[2], 1)})
    headwise_verdict.reporting.write(folder)
    done = keep(folder, tmp_path / "kept", "--note", "What is to be said.")
    assert done.returncode == 0, done.stderr
    forest = "paired-differences-in-test-accuracy.svg"
    diverged = [path.name for path in (tmp_path / "kept").glob("diverged*.svg")]
    tables = ["analysis.json", "table.csv", "differences.csv", "seeds.csv", "curves.csv"]
    curves = ["curves-accuracy.svg", "curves-loss.svg"]
    files = sorted(["README.md", *tables, *curves, forest, *diverged])
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == files
    assert "DropHead(p=0.2)" in (tmp_path / "kept" / forest).read_text(encoding="utf-8")
    page = (tmp_path / "kept" / "README.md").read_text(encoding="utf-8")
    analysis = json.loads((tmp_path / "kept" / "analysis.json").read_text())
    row = next(line for line in page.splitlines() if line.startswith("| `DropHead(p=0.2)`"))
    arm = analysis["arms"][1]
    assert f"{100 * arm['metrics']['test/accuracy']['mean']:.2f} [" in row
    assert f"+{100 * arm['differences']['test/accuracy']['mean']:.2f} [" in row
    assert "better" in row
    assert analysis["answer"] in page and "What is to be said." in page
    assert f"![Paired differences in test accuracy]({forest})" in page
    # a bar in an arm's text would end the cell
    assert "| `baseline \\| learning_rate=0.01` | 1 of 10 |" in page
    study = json.loads((folder / "study.json").read_text())
    assert f"Hardware: {study['hardware']['processor']}, {study['hardware']['cores']} cores." in page
    for name, version in study["versions"].items():
        assert f"{name} {version}" in page


@pytest.mark.grid
def test_learning_curves_are_means_over_seeds_by_arm_split_and_epoch(tmp_path):
    folder = write_study(tmp_path / "study", methods=("baseline", "DropHead(p=0.2)"), effects=(0.0, 0.05), seeds=3)
    headwise_verdict.reporting.write(folder)
    done = keep(folder, tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "kept" / "curves.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    runs = read_study(folder).of("DropHead(p=0.2)")
    for split in ("train", "test"):
        points = [r for r in rows if (r["metric"], r["arm"], r["split"]) == ("accuracy", "DropHead(p=0.2)", split)]
        for row in points:
            values = [line.metrics[f"{split}/accuracy"] for run in runs for line in run.epochs]
            at_epoch = values[int(row["epoch"]) - 1 :: len(points)]
            assert float(row["mean"]) == pytest.approx(statistics.fmean(at_epoch))
            assert int(row["seeds"]) == len(at_epoch) == 3
            assert float(row["low"]) <= float(row["mean"]) <= float(row["high"])
            # the training accuracies of this study are the same for all seeds
            assert split == "train" or float(row["low"]) < float(row["high"])
        assert [int(row["epoch"]) for row in points] == list(range(1, len(points) + 1))
    drawn = (tmp_path / "kept" / "curves-accuracy.svg").read_text(encoding="utf-8")
    assert "DropHead(p=0.2)" in drawn and "accuracy (%)" in drawn


@pytest.mark.grid
def test_without_test_figures_at_the_epochs_no_curve_is_kept(tmp_path):
    folder = write_study(
        tmp_path / "study", methods=("baseline", "DropHead(p=0.2)"), effects=(0.0, 0.05), seeds=2, test_curves=False
    )
    headwise_verdict.reporting.write(folder)
    assert keep(folder, tmp_path / "kept").returncode == 0
    assert not list((tmp_path / "kept").glob("curves*"))


def test_the_course_along_an_axis_is_kept(tmp_path):
    arms = ("baseline", "DropHead(p=0.1)", "DropHead(p=0.2)")
    axes = [("p", (0.0, 0.1, 0.2), arms)]
    folder = write_study(tmp_path / "study", methods=arms, effects=(0.0, 0.05, 0.1), seeds=10, axes=axes)
    headwise_verdict.reporting.write(folder)
    page = runpy.run_path(str(COMMAND))["study_page"](folder)
    row = next(line for line in page.splitlines() if line.startswith("| p | test accuracy |"))
    assert row.endswith("| 0.2 (at an end) |")
    assert float(row.split("|")[3].split()[0]) == pytest.approx(5.0, abs=0.5)


def in_phases(folder):
    """Write into every run what two tasks gave after each of two phases."""
    path = folder / "study.json"
    study = json.loads(path.read_text())
    path.write_text(
        json.dumps(study | {"evaluations": ["train", "validation", "test", "task 0", "task 1", "test/fog"]})
    )
    for result in folder.glob("runs/*/result.json"):
        found = json.loads(result.read_text())
        found["metrics"] |= {"heads/token_cosine/layer 2 head 1": 0.5}
        entries = {f"after {k}/task {i}/accuracy": 0.5 + 0.1 * k - 0.2 * i for k in (0, 1) for i in (0, 1)}
        result.write_text(json.dumps(found | {"metrics": found["metrics"] | entries | {"test/fog/accuracy": 0.25}}))
    return folder


@pytest.mark.grid
def test_statistics_by_depth_and_matrices_by_phase_are_kept_and_shown(tmp_path):
    folder = in_phases(write_study(tmp_path / "study", methods=("baseline", "A()"), seeds=6, heads=True))
    page = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert "After each phase" in page and 'id="figure-accuracy-after-each-phase-a' in page
    assert keep(folder, tmp_path / "kept").returncode == 0
    page = (tmp_path / "kept" / "README.md").read_text(encoding="utf-8")
    matrix = page.partition("after each phase: `A()`")[2].splitlines()
    assert [line for line in matrix if line.startswith("| ")][:4] == [
        "| phase | task 0 | task 1 |",
        "| --- | --- | --- |",
        "| after 0 | 50.00 | 30.00 |",
        "| after 1 | 60.00 | 40.00 |",
    ]
    # a deeper evaluation is no phase
    assert "fog" not in page.partition("after each phase")[2].partition("by depth")[0]
    others = page.partition("## Other outcomes")[2].partition("\n## ")[0].splitlines()
    rows = [line for line in others if line.startswith("| ")][2:]
    assert "| test/fog accuracy (%) | 25.00 | 25.00 |" in rows
    # phases and single heads have no row, nor has what is shown by depth or by itself
    assert [row for row in rows if "fog" not in row] == [
        row for row in rows if row.startswith("| attention entropy worst")
    ]
    depths = page.partition("## Token cosine by depth")[2]
    assert "| arm | layer 0 | layer 1 | layer 2 | layer 3 |" in depths
    analysis = json.loads((tmp_path / "kept" / "analysis.json").read_text())
    wanted = analysis["arms"][1]["metrics"]["heads/token_cosine/layer 2"]["mean"]
    # single heads are in the study's own analysis and not in what is kept
    alone = "heads/token_cosine/layer 2 head 1"
    whole = checked_analysis(folder / "analysis.json")
    assert alone in whole.outcomes and alone not in page
    kept = checked_analysis(tmp_path / "kept" / "analysis.json")
    assert set(whole.outcomes) - set(kept.outcomes) == {alone}
    assert alone not in kept.arms[1].metrics and alone not in kept.arms[1].differences
    lines = [(path / "table.csv").read_text().splitlines() for path in (folder, tmp_path / "kept")]
    assert lines[1] == [line for line in lines[0] if alone not in line] != lines[0]
    assert f"{wanted:.4g}" in next(line for line in depths.splitlines() if line.startswith("| `A()`"))


def test_what_a_claim_is_judged_by_is_drawn_by_step_where_it_was_watched(tmp_path):
    tests = [{"arm": "A()", "outcome": "heads/token_cosine/layer 3", "says": "lower"}]
    claims = [{"text": "Tokens differ.", "tests": tests}]
    folder = write_study(
        tmp_path / "study", methods=("baseline", "A()"), seeds=6, heads=True, watched=True, claims=claims
    )
    headwise_verdict.reporting.write(folder)
    names = runpy.run_path(str(COMMAND))["primary_figures"](folder)
    assert "token-cosine-cosine-by-step" in names and not any("entropy" in name for name in names)


def test_of_many_paragraphs_of_findings_those_after_the_second_follow_the_tables(tmp_path):
    (tmp_path / "found").mkdir()
    stored = json.loads((ROOT / "docs" / "results" / "alarms" / "findings.json").read_text())
    (tmp_path / "found" / "findings.json").write_text(json.dumps(stored))
    assert keep(tmp_path / "found", tmp_path / "kept", "--note", "A note.").returncode == 0
    before, found = (tmp_path / "kept" / "README.md").read_text().split("## How it was found")
    shown = [text for text in stored["paragraphs"] if text in before.partition("\n## ")[0]]
    assert shown == stored["paragraphs"][:2] and "A note." in before.partition("\n## ")[0]
    assert all(text in found for text in stored["paragraphs"][2:]) and len(stored["paragraphs"]) > 4


@pytest.mark.grid
def test_findings_are_kept_with_their_tables(tmp_path):
    (tmp_path / "found").mkdir()
    shutil.copy(ROOT / "docs" / "results" / "low-rank-toy" / "findings.json", tmp_path / "found")
    assert keep(tmp_path / "found", tmp_path / "kept").returncode == 0
    stored = json.loads((tmp_path / "kept" / "findings.json").read_text())
    page = (tmp_path / "kept" / "README.md").read_text(encoding="utf-8")
    assert all(paragraph in page for paragraph in stored["paragraphs"])
    assert page.count("\n|---") + page.count("\n| ---") == len(stored["tables"]) + bool(stored["claims"])


def test_a_folder_without_results_is_refused_and_nothing_is_written(tmp_path):
    done = keep(tmp_path, tmp_path / "kept")
    assert done.returncode == 1 and "contains neither analysis.json nor findings.json" in done.stderr
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("missing", ["versions", "hardware", "commit"])
def test_what_is_unknown_is_said_to_be(tmp_path, missing):
    folder = write_study(tmp_path / "study", methods=("baseline", "QKNorm()"), effects=(0.0, 0.0), seeds=3)
    headwise_verdict.reporting.write(folder)
    study = json.loads((folder / "study.json").read_text())
    study.pop(missing, None)
    (folder / "study.json").write_text(json.dumps(study))
    assert "unknown" in runpy.run_path(str(COMMAND))["study_page"](folder)
