"""Runs of several seeds that are one run get no verdict, and honest runs that share a coarse figure do."""

from __future__ import annotations

import csv
import json
import random
import shutil

import numpy as np
import pytest
from report.synthetic_study import write_study
from study_analysis.test_claims import claimed, judged, study

from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting.numbers import study_of_numbers
from headwise_verdict.results.across import across
from headwise_verdict.results.analysis import analyse, analyse_study
from headwise_verdict.results.copies import Trace, copied
from headwise_verdict.results.differences import paired_differences

SEEDS = range(6)


def table(folder, figures, outcomes=("accuracy:higher",)):
    """Judge a table whose arms have these figures: a list of numbers or of dicts by seed."""
    names = [outcome.partition(":")[0] for outcome in outcomes]
    with open(folder / "runs.csv", "w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["arm", "seed", *names])
        for arm, values in figures.items():
            for seed, value in enumerate(values):
                rows.writerow([arm, seed, *([value] if not isinstance(value, tuple) else value)])
    study_of_numbers(folder / "runs.csv", list(outcomes), next(iter(figures)), folder / "out")
    return analyse(folder / "out")


def verdict(analysis, arm=0):
    return analysis.compared[arm].differences[analysis.primary]


REPEATED = {
    "one number of four digits": {"plain": [0.9123] * 6, "drop": [0.9011] * 6},
    "one number of two digits": {"plain": [0.91] * 6, "drop": [0.9] * 6},
    "percent": {"plain": [91.23] * 7, "drop": [90.1] * 7},
    "the baseline alone": {"plain": [0.8417] * 6, "drop": [0.9011, 0.8913, 0.9144, 0.9001, 0.9071, 0.9155]},
    "an arm alone": {"plain": [0.9011, 0.8913, 0.9144, 0.9001, 0.9071, 0.9155], "drop": [0.8417] * 6},
    "three runs twice": {"plain": [0.9011, 0.8913, 0.9144] * 2, "drop": [0.8511, 0.8613, 0.8544] * 2},
    "one seed among others": {
        "plain": [0.9011, 0.8913, 0.9144, 0.9001, 0.9071, 0.9155],
        "drop": [0.8417] * 6,
        "norm": [0.9, 0.8, 0.91, 0.89, 0.88, 0.92],
    },
}


@pytest.mark.parametrize("what", REPEATED)
def test_a_table_of_one_run_under_several_seeds_has_no_verdict(tmp_path, what):
    analysis = table(tmp_path, REPEATED[what])
    entry = verdict(analysis)
    assert entry.verdict == "undecided" and entry.copies and entry.p is entry.p_corrected is entry.low is None
    assert entry.verdict_text.startswith("cannot be decided (") and "seeds 0, " in entry.verdict_text
    assert any("Copies of one run have no spread" in words for words in analysis.warnings)
    assert "it cannot be decided" in analysis.answer or len(analysis.compared) > 1


def test_the_copies_of_one_arm_leave_the_others_their_verdicts(tmp_path):
    analysis = table(
        tmp_path,
        {
            "plain": [0.90, 0.91, 0.92, 0.905, 0.915, 0.925],
            "drop": [0.8417] * 6,
            "norm": [0.94, 0.96, 0.95, 0.955, 0.949, 0.971],
        },
    )
    assert verdict(analysis).copies.startswith("seeds 0, 1, 2, 3, 4 and 5 have") and not verdict(analysis, 1).copies
    # nothing can be shown of copies, so the others are not corrected for them
    assert verdict(analysis, 1).verdict == "better" and verdict(analysis, 1).p_corrected == pytest.approx(2 / 2**6)


HONEST = {
    "twenty examples": {"plain": [0.85, 0.85, 0.9, 0.85, 0.8, 0.85], "drop": [0.95, 0.95, 0.95, 1.0, 0.95, 0.95]},
    "an arm of twenty examples": {"plain": [0.85] * 6, "drop": [0.95, 0.95, 0.95, 1.0, 0.95, 0.95]},
    "never and always": {"plain": [0.0] * 6, "drop": [1.0] * 6},
    "always, in percent": {"plain": [91.2, 93.1, 92.2, 90.7, 91.1, 92.9], "drop": [100.0] * 6},
    "one error of a thousand": {"plain": [0.981, 0.983, 0.982, 0.98, 0.984, 0.985], "drop": [0.999] * 6},
    "thirds": {"plain": [1 / 3, 1 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3], "drop": [2 / 3, 1, 1, 1, 2 / 3, 1]},
    "single precision": {
        "plain": [float(np.float32(one)) for one in (0.85, 0.85, 0.9, 0.85, 0.8, 0.85)],
        "drop": [float(np.float32(0.95))] * 5 + [1.0],
    },
    "F1 on few examples": {
        "plain": [0.5714285714285714, 0.6153846153846154, 0.5714285714285714, 0.6666666666666666, 0.6, 0.6],
        "drop": [0.7692307692307693, 0.8, 0.8571428571428571, 0.7692307692307693, 0.75, 0.9230769230769231],
    },
}  # fmt: skip


@pytest.mark.parametrize("what", HONEST)
def test_honest_runs_with_equal_coarse_figures_are_judged(tmp_path, what):
    analysis = table(tmp_path, HONEST[what])
    assert verdict(analysis).verdict == "better" and not verdict(analysis).copies and not analysis.warnings


def test_equal_scores_with_other_losses_are_honest_and_with_equal_ones_copies(tmp_path):
    rng = random.Random(0)
    outcomes = ("accuracy:higher", "loss:lower")
    figures = {"plain": [(0.6838, rng.uniform(0.6, 0.7)) for _ in SEEDS]}
    figures["drop"] = [(0.8 + 0.01 * rng.random(), rng.uniform(0.4, 0.5)) for _ in SEEDS]
    assert verdict(table(tmp_path, figures, outcomes)).verdict == "better"
    # a single row that was written down under two seeds
    figures["drop"][3] = figures["drop"][1]
    entry = verdict(table(tmp_path, figures, outcomes))
    assert entry.copies == "seeds 1 and 3 have the same figures" and entry.verdict == "undecided"


@pytest.fixture
def folder(tmp_path):
    return write_study(
        tmp_path / "study", methods=("baseline", "DropHead(p=0.2)"), effects=(0, 0.05), seeds=6, epochs=4
    )


def runs(folder):
    """Return the folders of the runs by arm and seed."""
    return {
        (config["arm"], config["seed"]): path.parent
        for path in folder.glob("runs/*/config.json")
        if (config := json.loads(path.read_text()))
    }


def changed(path, **more):
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def test_runs_with_one_curve_are_copies_whatever_their_outcomes(folder):
    assert analyse(folder).compared[0].differences["test/accuracy"].verdict == "better"
    found = runs(folder)
    shutil.copyfile(found["DropHead(p=0.2)", 0] / "metrics.jsonl", found["DropHead(p=0.2)", 4] / "metrics.jsonl")
    entry = verdict(analyse(folder))
    assert entry.copies == "seeds 0 and 4 have the same curve" and entry.verdict == "undecided"


def test_a_curve_without_movement_shows_nothing():
    flat = [{"step": step, "test/f1": 0.812267657992565} for step in (1, 2, 3)]
    arms = {"a": {seed: Trace({"test/f1": 0.8 + seed / 1000}, flat) for seed in SEEDS}}
    assert not copied(arms, ["test/f1"], [], seeded=True)
    moving = [*flat, {"step": 4, "test/f1": 0.9017}, {"step": 5, "test/f1": 0.901712345}]
    arms = {"a": {seed: Trace({"test/f1": 0.8 + seed / 1000}, moving) for seed in SEEDS}}
    assert copied(arms, ["test/f1"], [], seeded=True) == {"a": "seeds 0, 1, 2, 3, 4 and 5 have the same curve"}


def begun(folder, weights, data):
    """Let the runs have begun with these weights and data, by seed."""
    for (_, seed), path in runs(folder).items():
        evidence = {"weights": weights[seed]} | ({"data/1": "x", "data/2": data[seed]} if data else {})
        changed(path / "result.json", evidence=evidence)
    return analyse(folder)


def test_runs_that_begin_with_the_same_weights_and_batches_are_copies(folder):
    found = begun(folder, "abcdea", "uvwxyu")
    assert verdict(found).copies == "seeds 0 and 5 begin with the same weights and the same batches"
    assert [verdict(begun(folder, *start)).copies for start in (("aaaaaa", "uvwxyz"), ("abcdef", "uuuuuu"))] == ["", ""]


def test_a_pretrained_start_without_shown_data_is_judged_and_told(folder):
    found = begun(folder, "aaaaaa", "")
    assert verdict(found).verdict == "better" and not verdict(found).copies
    assert "All runs of baseline and DropHead(p=0.2) begin with the same weights" in found.warnings[0]
    assert not begun(folder, "abcdef", "").warnings


def test_runs_that_diverged_alike_say_nothing_of_divergence(folder):
    found = runs(folder)
    for seed in SEEDS:
        path = found["DropHead(p=0.2)", seed]
        changed(path / "result.json", status="diverged", divergence={"step": 3}, metrics={})
    assert analyse(folder).compared[0].divergence.verdict == "more often"
    for seed in SEEDS[1:]:
        shutil.copyfile(found["DropHead(p=0.2)", 0] / "metrics.jsonl", found["DropHead(p=0.2)", seed] / "metrics.jsonl")
    analysis = analyse(folder)
    assert analysis.compared[0].divergence is None and "diverged in 6 of 6 seeds." in analysis.answer


def of_losses(figures, **more):
    return study(figures, outcome="test/loss", **more)


LOSSES = {"baseline": [0.512345678] * 8, "A()": [0.523456789] * 8}


def test_a_study_whose_losses_are_equal_over_seeds_has_no_verdict_and_no_claim():
    made = of_losses(LOSSES)
    entry = paired_differences(made, "test/loss", False)["A()"]
    assert entry.copies and entry.verdict == "undecided" and entry.mean == pytest.approx(0.011111111)
    told = judged(made, claimed("higher", outcome="test/loss"))
    assert told.verdict == "not testable here" and "have the same figures" in told.why
    level = judged(made, claimed("higher", outcome="test/loss", against="baseline", level=0.4))
    assert level.verdict == "not testable here"


def test_a_metric_of_a_task_of_ours_may_be_coarse_in_all_arms():
    assert not study({"baseline": [0.5] * 8, "A()": [0.51] * 8}).copies


def test_copies_are_not_put_together_over_data_sets(tmp_path):
    rng = random.Random(1)
    folders = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        figures = {arm: [round(rng.uniform(0.8, 0.9), 4) for _ in SEEDS] for arm in ("plain", "drop")}
        if name == "two":
            figures["plain"] = [0.8123] * 6
        table(tmp_path / name, figures)
        (tmp_path / name / "out").rename(tmp_path / f"{name}-out")
        folders.append(tmp_path / f"{name}-out")
    with pytest.raises(StudyError, match="two-out, drop: plain: seeds 0, 1, 2, 3, 4 and 5 have the same figures"):
        across(folders)


def test_one_run_is_a_copy_of_none():
    assert not analyse_study(of_losses({"baseline": [0.512345678], "A()": [0.512345678]})).warnings
    assert not of_losses({"baseline": [0.512345678] * 2, "A()": [0.523]}).copies.get("A()")
