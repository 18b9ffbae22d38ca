"""Judging from Python: a table, pairs, differences, an iterator that trains; and the assertion for tests."""

import csv
import json
import math
import random

import numpy as np
import pytest

import headwise
from headwise.testing import assert_not_worse
from headwise_verdict.files.errors import StudyError

PAIRS = [(3.11, 3.20), (3.13, 3.21), (3.09, 3.19), (3.12, 3.20), (3.10, 3.19)]


def test_a_table_pairs_and_differences_are_judged_alike(tmp_path):
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("arm", "seed", "loss"))
        for seed, (mine, other) in enumerate(PAIRS):
            writer.writerows([("new", seed, mine), ("main", seed, other)])
    found = headwise.judge(path, metric="loss", candidate="new", baseline="main")
    assert found.answer == "accept" and found == headwise.judge(PAIRS)
    assert found == headwise.judge([mine - other for mine, other in PAIRS])
    # what trains is asked for no more than decides
    assert headwise.judge(mine - other for mine, other in PAIRS).answer == "accept"
    assert headwise.judge(PAIRS, better="higher").answer == "reject"
    assert headwise.judge(PAIRS[:2], budget=2).answer == "undecided"


def test_an_iterator_that_trains_stops_when_it_is_decided():
    trained = []

    def train():
        for pair in PAIRS:
            trained.append(pair)
            yield pair

    assert headwise.judge(train()).pairs == len(trained) == 4


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (PAIRS, {"better": "smaller"}, "better must be lower or higher, got 'smaller'"),
        ([(1.0, 2.0, 3.0)], {}, "pair 1 has 3 figures"),
        ([], {}, "no pair of runs"),
        ("runs.csv", {}, "metric must name the column"),
        (PAIRS, {"margin": -1.0}, "margin must be"),
    ],
)
def test_what_cannot_be_judged_is_refused(source, options, message):
    with pytest.raises(ValueError, match=message):
        headwise.judge(source, **options)


def test_a_candidate_that_is_as_good_passes_and_others_say_why():
    draws = random.Random(0)
    main = [draws.gauss(3.2, 0.1) for _ in range(10)]
    near = [value + draws.gauss(0, 0.01) for value in main]
    assert_not_worse(near, main, margin=0.05)
    assert_not_worse(dict(enumerate(near)), dict(enumerate(main)), margin=0.05)
    with pytest.raises(AssertionError, match=r"is worse by more than 0.05: it loses 0\.\d+ \[0\.\d+, 0\.\d+\]$"):
        assert_not_worse([value + 0.2 for value in near], main, margin=0.05)
    assert_not_worse([value + 0.2 for value in near], main, margin=0.05, better="higher")
    with pytest.raises(AssertionError, match=r"not shown to be no worse by more than 0\.05.*about \d+ more pairs"):
        assert_not_worse(near[:3], main[:3], margin=0.05)
    with pytest.raises(AssertionError, match="run at least four"):
        assert_not_worse(near[:1], main[:1], margin=0.05)


@pytest.mark.parametrize(
    ("candidate", "baseline", "options", "message"),
    [
        ([1.0], [1.0, 2.0], {}, "there are 1 runs and 2"),
        ({0: 1.0, 1: 1.0}, {0: 1.0}, {}, "seeds 1 have a run in one arm only"),
        ({0: 1.0}, [1.0], {}, "both arms by seed, or both as sequences"),
        ([1.0], [1.0], {"margin": 0.0}, "margin must be above 0"),
        ([1.0], [1.0], {"better": "less"}, "better must be"),
    ],
)
def test_an_assertion_without_pairs_or_margin_is_refused(candidate, baseline, options, message):
    with pytest.raises(ValueError, match=message):
        assert_not_worse(candidate, baseline, **{"margin": 0.1, **options})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({0: -0.1, 1: -0.2}, "source is a mapping"),
        ([1e308, 1e308], r"pair 1 has 1e\+308: a run that diverged has no figure"),
        ([(1.0, 2.0), (math.nan, 2.0)], "pair 2 has nan: a run that diverged has no figure"),
        ([10**400], "pair 1 has 10+, which is not a number"),
        ([None], "pair 1 has None, which is not a number"),
    ],
)
def test_figures_that_are_none_are_refused(source, message):
    with pytest.raises((TypeError, ValueError), match=message):
        headwise.judge(source)


def test_rows_of_an_array_are_pairs():
    assert headwise.judge(np.array(PAIRS)) == headwise.judge(PAIRS)
    assert_not_worse(*np.array([[3.0, 3.01, 2.99, 3.0, 3.02], [3.0, 3.02, 2.98, 3.01, 3.02]]), margin=0.5)


def test_a_loop_in_python_shares_the_ledger_of_the_command(tmp_path):
    ledger = tmp_path / "judged.jsonl"
    named = {"metric": "loss", "ledger": ledger}
    first = headwise.judge(PAIRS[:2], candidate="lr=3e-4", **named)
    assert (
        first.answer == "go on"
        and first.rule.alpha < 0.05
        and "0 of 1 candidates accepted, 1 still open" in first.notes
    )
    # the same candidate keeps its level, and the next gets another one
    again = headwise.judge(PAIRS[:3], candidate="lr=3e-4", **named)
    assert again.rule.alpha == first.rule.alpha > headwise.judge(PAIRS[:2], candidate="lr=6e-4", **named).rule.alpha
    assert any(
        "now 3 pairs" in note or "replaced" in note
        for note in headwise.judge(PAIRS[2:], candidate="lr=3e-4", **named).notes
    )
    lines = list(map(json.loads, ledger.read_text().splitlines()))
    assert [line["candidate"] for line in lines] == ["lr=3e-4", "lr=3e-4", "lr=6e-4"]
    assert {line["metric"] for line in lines} == {"loss:lower"} and lines[0]["of"] == 0.05
    with pytest.raises(ValueError, match="a ledger keeps each candidate by its name"):
        headwise.judge(PAIRS, ledger=ledger)
    with pytest.raises(TypeError, match="ledger must be the path of a file, got 3"):
        headwise.judge(PAIRS, candidate="a", metric="loss", ledger=3)


def test_an_iterator_that_trains_has_its_level_before_it_trains(tmp_path):
    ledger = tmp_path / "judged.jsonl"
    seen = []

    def train():
        for pair in PAIRS:
            seen.append(json.loads(ledger.read_text().splitlines()[0])["pairs"])
            yield pair

    decision = headwise.judge(train(), candidate="lr=3e-4", metric="loss", ledger=ledger, alpha=0.5)
    assert decision.answer == "accept" and seen == [0] * decision.pairs


def test_a_bound_is_that_of_the_command():
    decision = headwise.judge(PAIRS, bound=0.2)
    assert decision.answer == "go on" and decision.rule.bound == 0.2 and -0.2 <= decision.low < decision.high < 0.2
    with pytest.raises(StudyError, match="pair 1 differs by"):
        headwise.judge(PAIRS, bound=0.01)


def test_pairs_after_the_decision_keep_the_notes_on_their_order():
    assert "all 6 differences are -0.5" in headwise.judge([-0.5] * 6).notes[0]


@pytest.mark.parametrize(
    ("candidate", "baseline", "options", "message"),
    [
        ([9.0, 9.1, 9.3, 9.2], [1.0] * 4, {"margin": math.inf}, "margin must be a number"),
        ([9.0, 9.1, 9.3, 9.2], [1.0] * 4, {"alpha": 1.5}, "alpha must be between 0 and 1"),
        ([1.0, math.nan], [1.0, 1.0], {}, "pair 2 is .nan, 1.0.: a run that diverged has no figure"),
        ([1.0] * 5, [0.99] * 5, {}, "all 5 pairs are .1.0, 0.99.: they repeat one run"),
        ({}, {}, {}, "there are no runs"),
        ({0: 1.0, "a": 1.0}, {1: 1.0, "a": 1.0}, {}, "seeds 0, 1 have a run in one arm only"),
    ],
)
def test_an_assertion_that_would_pass_anything_is_refused(candidate, baseline, options, message):
    with pytest.raises(ValueError, match=message):
        assert_not_worse(candidate, baseline, **{"margin": 0.1, **options})
    assert_not_worse([1.0] * 5, [1.0] * 5, margin=0.1)
