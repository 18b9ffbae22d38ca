"""The statistics of a comparison, against hand computations and brute force."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from report.synthetic_study import write_study

from headwise_verdict.results.analysis import analyse
from headwise_verdict.results.analysis_record import Analysis
from headwise_verdict.results.differences import paired_differences
from headwise_verdict.results.folder import read_study
from headwise_verdict.results.intervals import interval

TWO = ("baseline", "Other()")


def test_few_values_get_students_t():
    found = interval([1, 2, 3, 4, 5])
    half = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))
    assert found.how == "Student's t"


def test_twenty_values_get_a_bootstrap_that_repeats():
    values = np.random.default_rng(1).exponential(size=20)
    found = interval(values)
    assert found == interval(values)
    assert "bootstrap" in found.how
    assert found.low < found.mean < found.high
    # The interval of skewed values leans with them; Student's t cannot.
    assert found.high - found.mean > found.mean - found.low
    assert interval(values[:19]).how == "Student's t"


@pytest.mark.parametrize(("values", "mean"), [([], None), ([2.0], 2.0)])
def test_without_two_values_there_is_no_interval(values, mean):
    found = interval(values)
    assert (found.mean, found.low, found.high) == (mean, None, None)


@pytest.mark.parametrize("count", [3, 25])
def test_equal_values_have_an_interval_of_no_width(count):
    found = interval([0.25] * count)
    assert (found.low, found.high) == (0.25, 0.25)


def test_values_that_differ_by_rounding_alone_are_equal():
    found = interval([0.9] * 19 + [0.9000000000000001])
    assert found.low == found.high == found.mean == pytest.approx(0.9)


def test_students_t_covers_as_claimed_where_the_percentile_bootstrap_of_five_does_not():
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(2000, 5))
    covered = [found.low < 0 < found.high for found in map(interval, samples)]
    assert 0.935 < np.mean(covered) < 0.965
    means = samples[:, rng.integers(0, 5, (1000, 5))].mean(2)
    low, high = np.percentile(means, [2.5, 97.5], axis=1)
    assert 0.82 < np.mean((low < 0) & (high > 0)) < 0.86


def study_of(folder, **settings):
    return read_study(write_study(folder, **settings))


def test_five_seeds_cannot_decide_and_six_can_among_eight_arms(tmp_path):
    five = paired_differences(study_of(tmp_path / "5", seeds=5), "test/accuracy", True)
    effects = (0.0, 0.09, 0.0, 0.0, 0.0, 0.0, -0.09, 0.0, 0.0)
    six = paired_differences(study_of(tmp_path / "6", seeds=6, effects=effects), "test/accuracy", True)
    assert {entry.verdict for entry in five.values()} == {"undecided"}
    assert five["DropHead(p=0.2)"].verdict_text == "cannot be decided with 5 seeds (smallest possible p 0.062)"
    assert six["DropColumn(p=0.2)"].verdict == "better"
    assert six["DropColumn(p=0.2)"].p_corrected == six["DropColumn(p=0.2)"].smallest_p == 2 / 2**6
    assert six["Decorrelation(strength=0.1)"].verdict == "worse"
    assert six["RelaxedAttention(gamma=0.1)"].verdict == "no evidence"


def test_the_verdict_follows_the_direction_of_the_metric(tmp_path):
    study = study_of(tmp_path, methods=TWO, effects=(0, 0.03))
    better = {
        name: paired_differences(study, name, up)["Other()"].verdict
        for name, up in (("test/accuracy", True), ("test/loss", False))
    }
    assert better == {"test/accuracy": "better", "test/loss": "better"}
    assert paired_differences(study, "test/accuracy", False)["Other()"].verdict == "worse"
    assert paired_differences(study, "gap/accuracy", None)["Other()"].verdict == "lower"


def test_differences_are_taken_within_a_seed(tmp_path):
    study = study_of(tmp_path, methods=TWO, effects=(0, 0.01))
    entry = paired_differences(study, "test/accuracy", True)["Other()"]
    for seed in study.seeds:
        ours, base = (study.runs[method, seed].metric("test/accuracy") for method in ("Other()", "baseline"))
        assert entry.by_seed[str(seed)] == pytest.approx(ours - base, abs=1e-15)


def test_a_diverged_run_is_counted_but_not_averaged_in(tmp_path):
    whole = analyse(write_study(tmp_path / "whole", methods=TWO))
    found = analyse(write_study(tmp_path / "broken", methods=TWO, diverged={("Other()", 2), ("baseline", 4)}))
    other = found.arms[1]
    assert [(run.seed, run.step) for run in other.runs.diverged] == [(2, 40)]
    assert other.runs.finished == 9
    difference = other.differences["test/accuracy"]
    assert difference.n == 8
    assert difference.excluded == [2, 4]
    kept = [
        value for seed, value in whole.arms[1].differences["test/accuracy"].by_seed.items() if seed not in ("2", "4")
    ]
    assert difference.mean == pytest.approx(np.mean(kept))
    assert (
        "Other() diverged in 1 of 10 seeds, baseline in 1 (no evidence of a difference, exact p = 1.00)."
        in found.answer
    )
    assert found.complete


def test_a_method_that_always_diverges_has_no_difference(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, seeds=3, diverged={("Other()", seed) for seed in range(3)}))
    difference = found.arms[1].differences["test/accuracy"]
    assert (difference.mean, difference.p_corrected, difference.verdict_text) == (
        None,
        None,
        "no pair of finished runs",
    )


def test_missing_runs_are_named_and_the_answer_is_provisional(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, missing={("Other()", 1)}))
    assert [(cell.arm, cell.seed) for cell in found.missing] == [("Other()", 1)]
    assert found.answer.startswith("So far, in test accuracy")
    assert found.arms[1].differences["test/accuracy"].n == 9


def test_within_a_declared_margin_an_arm_is_equivalent_and_without_one_it_is_no_evidence(tmp_path):
    settings = {"methods": TWO, "effects": (0, 0.0)}
    declared = analyse(write_study(tmp_path / "margin", **settings, margin=0.02))
    entry = declared.arms[1].differences["test/accuracy"]
    assert entry.verdict == entry.verdict_text == "equivalent"
    assert entry.within < 0.02 and entry.p_equivalent < 0.05
    assert declared.answer == (
        "In test accuracy, with 10 seeds: Other() is equivalent to the baseline within ±2.00 points."
    )
    # a margin belongs to the primary outcome
    assert declared.arms[1].differences["test/loss"].verdict == "no evidence"
    silent = analyse(write_study(tmp_path / "none", **settings)).arms[1].differences["test/accuracy"]
    assert silent.verdict == "no evidence" and silent.within == entry.within and silent.p_equivalent is None
    narrow = analyse(write_study(tmp_path / "narrow", **settings, margin=0.0005)).arms[1].differences["test/accuracy"]
    assert narrow.verdict == "no evidence" and narrow.p_equivalent > 0.05


def test_a_difference_within_the_margin_is_both(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, effects=(0, 0.03), margin=0.2))
    entry = found.arms[1].differences["test/accuracy"]
    assert entry.verdict == "better" and entry.verdict_text == "better (by less than the margin)"


def test_no_evidence_says_what_could_have_been_detected(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, effects=(0, 0.0)))
    entry = found.arms[1].differences["test/accuracy"]
    assert 0 < (entry.high - entry.low) / 2 < entry.detectable < entry.high - entry.low
    assert f"(80\u00a0% power to detect {100 * entry.detectable:.2f} points)" in found.answer


def test_pairing_is_worth_the_seeds_that_the_shared_part_would_cost(tmp_path):
    entry = analyse(write_study(tmp_path, methods=TWO, seeds=40)).arms[1].differences["test/accuracy"]
    # standard deviations 0.01 shared and 0.004 own: (1.16e-4 · 2) / (0.16e-4 · 2)
    assert entry.pairing == pytest.approx(7.25, rel=0.5)


def test_the_control_arm_that_differs_warns_of_the_whole_study(tmp_path):
    methods = ("baseline", "same", "Other()")
    quiet = analyse(write_study(tmp_path / "quiet", methods=methods, effects=(0, 0.0, 0.03)))
    assert quiet.warnings == []
    loud = analyse(write_study(tmp_path / "loud", methods=methods, effects=(0, 0.03, 0.0)))
    assert "'same' is the baseline under another name, and yet it is better" in loud.warnings[0]


def test_a_diverged_run_counts_as_failure_where_the_task_declares_one(tmp_path):
    settings = {"methods": TWO, "diverged": {("Other()", 2), ("Other()", 5)}}
    found = analyse(write_study(tmp_path / "declared", **settings, failure=0.1))
    entry = found.arms[1].differences["test/accuracy"]
    assert (entry.n, entry.excluded, entry.failed) == (10, [], [2, 5])
    assert found.arms[1].metrics["test/accuracy"].low < 0.6 < 0.8 < found.arms[0].metrics["test/accuracy"].low
    assert entry.by_seed["2"] == pytest.approx(
        0.1 - read_study(tmp_path / "declared").figure("baseline", 2, "test/accuracy")
    )
    assert found.arms[1].differences["test/loss"].excluded == [2, 5]
    assert "counts as 0.1 in test accuracy" in found.statistics["difference"]
    silent = analyse(write_study(tmp_path / "silent", **settings)).arms[1].differences["test/accuracy"]
    assert (silent.n, silent.excluded) == (8, [2, 5])


def test_divergence_leads_the_answer_with_an_exact_test(tmp_path):
    broken = {("Other()", seed) for seed in range(7)}
    found = analyse(write_study(tmp_path, methods=TWO, diverged=broken, failure=0.1))
    test = found.arms[1].divergence
    assert (test.only_arm, test.only_baseline, test.verdict) == (7, 0, "more often")
    assert test.p == test.p_corrected == pytest.approx(2 / 2**7)
    assert found.answer.startswith(
        "Other() diverged in 7 of 10 seeds, baseline in 0 (more often, exact p = 0.016). In test"
    )
    assert found.arms[0].divergence is None
    assert [(run.seed, run.step, run.why) for run in found.arms[1].runs.diverged[:1]] == [(0, 40, "loss rose")]


def test_divergence_is_corrected_for_the_arms_that_could_have_shown_it(tmp_path):
    methods = ("baseline", "A()", "B()", "C()")
    broken = {("A()", seed) for seed in range(7)}
    found = analyse(write_study(tmp_path, methods=methods, diverged=broken))
    test = found.arms[1].divergence
    # no flip of an arm that never diverged is as small, so that it costs nothing
    assert test.p == test.p_corrected == pytest.approx(2 / 2**7)
    assert test.verdict == "more often"


def test_many_diverged_arms_are_summed_up(tmp_path):
    methods = ("baseline", *(f"A(p={at})" for at in range(5)))
    broken = {(method, seed) for method in methods[1:] for seed in (0, 1)}
    found = analyse(write_study(tmp_path, methods=methods, diverged=broken))
    assert found.answer.startswith("10 runs of 5 arms diverged, no arm demonstrably more often than the baseline.")


def test_a_trend_follows_an_axis(tmp_path):
    arms = tuple(f"NeuTRENO(strength={value})" for value in (0.0, 0.1, 0.2, 0.4))
    axis = ("NeuTRENO.strength", (0.4, 0.0, 0.1, 0.2), (arms[3], *arms[:3]))
    found = analyse(write_study(tmp_path, methods=("baseline", *arms), effects=(0, 0, 0.02, 0.06, 0.04), axes=[axis]))
    trend = next(one for one in found.trends if one.outcome == "test/accuracy")
    assert trend.values == [0.0, 0.1, 0.2, 0.4] and trend.arms == list(arms)
    assert trend.step == pytest.approx(0.016, abs=0.004) and trend.p < 0.01 and trend.page < 0.01
    assert (trend.best, trend.inside, trend.seeds) == (0.2, True, 10)
    falling = next(one for one in found.trends if one.outcome == "test/loss")
    assert falling.step < 0 and falling.best == 0.2
    assert next(one for one in found.trends if one.outcome == "train/accuracy").best is None


def test_outcomes_of_heads_are_compared_too(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, effects=(0, 0.03), heads=True))
    assert next(iter(found.outcomes)) == "test/accuracy"
    assert found.outcomes["heads/token_cosine/layer 3"].kind == "heads"
    assert found.arms[1].differences["heads/token_cosine/layer 3"].verdict == "lower"
    assert found.arms[1].differences["heads/attention_entropy/worst"].verdict == "higher"


def test_the_analysis_is_json_without_nan(tmp_path):
    found = analyse(write_study(tmp_path, seeds=2, diverged={("baseline", 0)}))
    stored = json.loads(json.dumps(found.model_dump(mode="json"), allow_nan=False))
    assert Analysis.model_validate(stored) == found


def test_costs_are_medians_and_the_gap_is_train_minus_test(tmp_path):
    found = analyse(write_study(tmp_path, methods=TWO, seeds=3))
    baseline = found.arms[0]
    written = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/result.json")]
    seconds = sorted(run["metrics"]["cost/seconds_per_step"] for run in written if run["arm"] == "baseline")
    assert len(seconds) == 3 and baseline.costs["seconds_per_step"] == pytest.approx(seconds[1])
    gap = baseline.metrics["train/accuracy"].mean - baseline.metrics["test/accuracy"].mean
    assert baseline.metrics["gap/accuracy"].mean == pytest.approx(gap)


def test_a_metric_that_is_not_finite_makes_no_pair(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=3)
    path = next(folder.glob("runs/0001*1/result.json"))
    result = json.loads(path.read_text())
    result["metrics"]["test/accuracy"] = math.nan
    path.write_text(json.dumps(result))
    assert analyse(folder).arms[1].differences["test/accuracy"].excluded == [1]


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
            "In test accuracy, with 10 seeds, there is no evidence that Other() differs from the baseline "
            "(80\u00a0% power to detect 0.27 points).",
        ),
        (
            {"methods": TWO, "seeds": 3},
            "In test accuracy, with 3 seeds, it cannot be decided whether Other() differs from the baseline.",
        ),
    ],
)
def test_the_answer_is_built_from_the_verdicts(tmp_path, settings, answer):
    assert analyse(write_study(tmp_path, **settings)).answer == answer
