"""The statistics of a comparison, against hand computations and brute force."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from report.synthetic_study import write_study

from headwise.comparing.results.analysis import analyse, holm, interval, paired_differences, sign_flip, smallest_p
from headwise.comparing.results.folder import read_study

TWO = ("baseline", "Other()")


def brute_force(differences):
    """Count the sign flips whose mean is at least as far from 0, one by one."""
    seen = abs(sum(differences))
    flips = list(itertools.product((1, -1), repeat=len(differences)))
    far = [abs(sum(s * d for s, d in zip(signs, differences))) >= seen - 1e-12 for signs in flips]
    return sum(far) / len(flips)


@pytest.mark.parametrize("pairs", [1, 2, 3, 5, 8, 10])
def test_the_permutation_test_counts_every_sign_flip(pairs):
    rng = np.random.default_rng(pairs)
    for differences in (rng.normal(0.5, 1, pairs), rng.integers(-2, 3, pairs) / 360, np.abs(rng.normal(size=pairs))):
        assert sign_flip(differences) == pytest.approx(brute_force(differences), abs=1e-12)


def test_differences_that_are_all_zero_are_no_evidence():
    assert sign_flip([0.0] * 10) == 1.0


@pytest.mark.parametrize("pairs", [1, 3, 9, 16, 17, 20])
def test_the_smallest_p_is_reached_when_all_differences_agree(pairs):
    differences = np.arange(1, pairs + 1)
    assert sign_flip(differences) == pytest.approx(smallest_p(pairs))
    assert smallest_p(pairs) == 2 / 2**pairs


def test_the_exact_test_is_that_of_scipy():
    from scipy import stats

    differences = np.random.default_rng(13).normal(0.4, 1, 13)
    found = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf, batch=4096)
    assert sign_flip(differences) == pytest.approx(found.pvalue, abs=1e-12)


@pytest.mark.parametrize("pairs", [17, 20])
def test_p_is_a_share_of_all_flips_up_to_twenty_pairs(pairs):
    # flips come in pairs of opposite sums
    count = sign_flip(np.random.default_rng(pairs).normal(0.4, 1, pairs)) * 2 ** (pairs - 1)
    assert count == pytest.approx(round(count), abs=1e-6) and count >= 1


def test_the_report_says_up_to_how_many_pairs_the_test_is_exact(tmp_path):
    for seeds, exact in ((20, True), (21, False)):
        found = analyse(write_study(tmp_path / str(seeds), methods=TWO, effects=(0, 0.02), seeds=seeds, epochs=1))
        assert found["methods"][1]["differences"]["test_accuracy"]["exact"] is exact
        assert "exact up to 20 pairs, else 99,999 random flips" in found["statistics"]["p"]


def test_many_pairs_use_random_flips_that_repeat():
    differences = np.random.default_rng(0).normal(0.3, 1, 40)
    p = sign_flip(differences)
    assert p == sign_flip(differences)
    z = differences.mean() / (np.sqrt((differences**2).mean()) / math.sqrt(40))
    assert p == pytest.approx(math.erfc(abs(z) / math.sqrt(2)), abs=0.01)
    assert smallest_p(40) == 2 / 100_000


def test_holm_agrees_with_a_computation_by_hand():
    # sorted: .005·4 = .02, .01·3 = .03, .03·2 = .06, .04·1 = .04 → .06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_few_values_get_students_t():
    found = interval([1, 2, 3, 4, 5])
    half = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)
    assert (found["low"], found["high"]) == pytest.approx((3 - half, 3 + half))
    assert found["interval"] == "Student's t"


def test_twenty_values_get_a_bootstrap_that_repeats():
    values = np.random.default_rng(1).exponential(size=20)
    found = interval(values)
    assert found == interval(values)
    assert "bootstrap" in found["interval"]
    assert found["low"] < found["mean"] < found["high"]
    # The interval of skewed values leans with them; Student's t cannot.
    assert found["high"] - found["mean"] > found["mean"] - found["low"]
    assert interval(values[:19])["interval"] == "Student's t"


@pytest.mark.parametrize(("values", "mean"), [([], None), ([2.0], 2.0)])
def test_without_two_values_there_is_no_interval(values, mean):
    found = interval(values)
    assert (found["mean"], found["low"], found["high"]) == (mean, None, None)


@pytest.mark.parametrize("count", [3, 25])
def test_equal_values_have_an_interval_of_no_width(count):
    found = interval([0.25] * count)
    assert (found["low"], found["high"]) == (0.25, 0.25)


def test_students_t_covers_as_claimed_where_the_percentile_bootstrap_of_five_does_not():
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(2000, 5))
    covered = [found["low"] < 0 < found["high"] for found in map(interval, samples)]
    assert 0.935 < np.mean(covered) < 0.965
    means = samples[:, rng.integers(0, 5, (1000, 5))].mean(2)
    low, high = np.percentile(means, [2.5, 97.5], axis=1)
    assert 0.82 < np.mean((low < 0) & (high > 0)) < 0.86


def study_of(folder, **settings):
    return read_study(write_study(folder, **settings))


def test_eight_seeds_cannot_decide_among_eight_methods_and_nine_can(tmp_path):
    eight = paired_differences(study_of(tmp_path / "8", seeds=8), "test_accuracy", True)
    nine = paired_differences(study_of(tmp_path / "9", seeds=9), "test_accuracy", True)
    assert {entry["verdict"] for entry in eight.values()} == {"undecided"}
    assert eight["DropHead(p=0.2)"]["verdict_text"] == "cannot be decided with 8 seeds (smallest possible p 0.062)"
    assert nine["DropColumn(p=0.2)"]["verdict"] == "better"
    assert nine["DropColumn(p=0.2)"]["smallest_p_corrected"] == pytest.approx(8 * 2 / 2**9)
    assert nine["Decorrelation(strength=0.1)"]["verdict"] == "worse"
    assert nine["RelaxedAttention(gamma=0.1)"]["verdict"] == "no evidence"


def test_the_verdict_follows_the_direction_of_the_metric(tmp_path):
    study = study_of(tmp_path, methods=TWO, effects=(0, 0.03))
    better = {
        name: paired_differences(study, name, up)["Other()"]["verdict"]
        for name, up in (("test_accuracy", True), ("test_loss", False))
    }
    assert better == {"test_accuracy": "better", "test_loss": "better"}
    assert paired_differences(study, "test_accuracy", False)["Other()"]["verdict"] == "worse"
    assert paired_differences(study, "gap_accuracy", None)["Other()"]["verdict"] == "lower"


def test_differences_are_taken_within_a_seed(tmp_path):
    study = study_of(tmp_path, methods=TWO, effects=(0, 0.01))
    entry = paired_differences(study, "test_accuracy", True)["Other()"]
    for seed in study.seeds:
        ours, base = (study.runs[method, seed].metric("test_accuracy") for method in ("Other()", "baseline"))
        assert entry["by_seed"][str(seed)] == pytest.approx(ours - base, abs=1e-15)


def test_a_diverged_run_is_counted_but_not_averaged_in(tmp_path):
    whole = analyse(write_study(tmp_path / "whole", methods=TWO))
    found = analyse(write_study(tmp_path / "broken", methods=TWO, diverged={("Other()", 2), ("baseline", 4)}))
    other = found["methods"][1]
    assert [(run["seed"], run["step"]) for run in other["runs"]["diverged"]] == [(2, 40)]
    assert other["runs"]["finished"] == 9
    difference = other["differences"]["test_accuracy"]
    assert difference["n"] == 8
    assert difference["excluded"] == [2, 4]
    kept = [
        value
        for seed, value in whole["methods"][1]["differences"]["test_accuracy"]["by_seed"].items()
        if seed not in ("2", "4")
    ]
    assert difference["mean"] == pytest.approx(np.mean(kept))
    assert "Other() diverged in 1 of 10 seeds." in found["answer"]
    assert found["complete"]


def test_a_method_that_always_diverges_has_no_difference(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, seeds=3, diverged={("Other()", seed) for seed in range(3)}))
    difference = found["methods"][1]["differences"]["test_accuracy"]
    assert (difference["mean"], difference["p_corrected"], difference["verdict_text"]) == (
        None,
        None,
        "no pair of finished runs",
    )


def test_missing_runs_are_named_and_the_answer_is_provisional(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, missing={("Other()", 1)}))
    assert found["missing"] == [{"method": "Other()", "seed": 1}]
    assert found["answer"].startswith("So far, in test accuracy")
    assert found["methods"][1]["differences"]["test_accuracy"]["n"] == 9


def test_the_correction_counts_methods_that_have_no_pair_yet(tmp_path):
    methods = ("baseline", "A()", "B()")
    settings = {"methods": methods, "effects": (0, 0.03, 0.0), "seeds": 6}
    alone = paired_differences(
        study_of(tmp_path / "a", **settings, missing={("B()", s) for s in range(6)}), "test_accuracy", True
    )
    assert alone["A()"]["p_corrected"] == pytest.approx(2 * 2 / 2**6)


def test_a_verdict_needs_the_interval_too(tmp_path, monkeypatch):
    study = study_of(tmp_path, methods=TWO, effects=(0, 0.03))
    import headwise.comparing.results.analysis as analysis

    real = analysis.interval
    monkeypatch.setattr(analysis, "interval", lambda values: real(values) | {"low": -1.0, "high": 1.0})
    entry = paired_differences(study, "test_accuracy", True)["Other()"]
    assert entry["p_corrected"] < 0.05
    assert entry["verdict"] == "no evidence"


def test_the_analysis_is_json_without_nan(tmp_path):
    found = analyse(write_study(tmp_path, seeds=2, diverged={("baseline", 0)}))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_costs_are_medians_and_the_gap_is_train_minus_test(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, seeds=3))
    baseline = found["methods"][0]
    assert baseline["costs"]["seconds_per_step"] == pytest.approx(0.0103)
    gap = baseline["metrics"]["train_accuracy"]["mean"] - baseline["metrics"]["test_accuracy"]["mean"]
    assert baseline["metrics"]["gap_accuracy"]["mean"] == pytest.approx(gap)


def test_a_metric_that_is_not_finite_makes_no_pair(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=3)
    path = next(folder.glob("runs/0001*1/result.json"))
    result = json.loads(path.read_text())
    result["metrics"]["test_accuracy"] = math.nan
    path.write_text(json.dumps(result))
    assert analyse(folder)["methods"][1]["differences"]["test_accuracy"]["excluded"] == [1]


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"methods": ("baseline",)}, "Only baseline was run, with 10 seeds: there is nothing to compare."),
        (
            {"methods": TWO, "effects": (0, 0.03)},
            "In test accuracy, with 10 seeds: Other() is better than the baseline.",
        ),
        (
            {"methods": TWO, "effects": (0, 0.0)},
            "In test accuracy, with 10 seeds, there is no evidence that Other() differs from the baseline.",
        ),
        (
            {"methods": TWO, "seeds": 3},
            "In test accuracy, with 3 seeds, it cannot be decided whether Other() differs from the baseline.",
        ),
    ],
)
def test_the_answer_is_built_from_the_verdicts(tmp_path, settings, answer):
    assert analyse(write_study(tmp_path, **settings))["answer"] == answer
