"""A ladder of rates: the critical rate is where it should be, every rung begins anew, and the two studies of it run at
their least size."""

from __future__ import annotations

import importlib
import json
import math

import pytest
import torch
from headwise_papers.tasks.character_lm import CHARACTERS
from headwise_papers.tasks.rate_ladder import UNIGRAM, RateLadder, critical_rate, effective_rank
from small_studies import carry

from headwise.lab.comparing.claim_check import canonical_claims

TINY = {
    "rates": (0.01, 0.3),
    "dim": 8,
    "heads": 2,
    "depth": 1,
    "context": 8,
    "steps": 4,
    "batch_size": 4,
    "test_size": 12,
}


def at_least_size(study, folder, methods, **settings):
    """Return a study of one seed without claims."""
    task = type(study.task)(**study.task.model_dump() | TINY | settings)
    update = {"task": task.located(folder), "methods": methods, "seeds": 1, "claims": ()}
    return study.model_copy(update={**update, "premises": ()})


def test_the_critical_rate_lies_on_the_line_between_two_rungs():
    rates = (0.001, 0.01, 0.1, 1.0)
    # from 2 at 0.01 to 4 at 0.1, 3 is half-way in the logarithm
    assert critical_rate(rates, [2.5, 2.0, 4.0, 3.5], 3.0) == pytest.approx(-1.5)
    assert critical_rate(rates, [2.5, 2.0, 2.2, 3.8], 3.0) == pytest.approx(-1 + 0.5)
    # a loss that is high at a rate below the best one is no failure
    assert critical_rate(rates, [3.5, 2.0, 2.1, 2.2], 3.0) == pytest.approx(0.0)
    assert critical_rate(rates, [3.5, 3.2, 3.6, 3.7], 3.0) == pytest.approx(-3.0)


def test_the_effective_rank_counts_equal_directions():
    tokens = torch.zeros(3, 5, 4)
    tokens[0, :4] = torch.eye(4)
    tokens[1, :2, :2] = torch.eye(2)
    tokens[2] = torch.tensor([1.0, 2.0, 0.0, -1.0])
    torch.testing.assert_close(effective_rank(tokens), torch.tensor([4.0, 2.0, 1.0]))


def test_the_summary_holds_the_best_rung_and_the_mean_excess():
    task = RateLadder(rates=(0.01, 0.1, 1.0), level=3.0)
    losses = {"rate 0.01/test/loss": 2.5, "rate 0.1/test/loss": 2.1, "rate 1/test/loss": 9.0}
    found = task.summary(losses)
    assert found["test/best_loss"] == 2.1 and found["test/best_rate"] == pytest.approx(-1)
    # a loss above that of the shares of characters counts as these
    assert found["test/sensitivity"] == pytest.approx((0.4 + 0 + UNIGRAM - 2.1) / 3)
    assert -1 < found["test/critical_rate"] < 0


def test_a_ladder_that_does_not_rise_is_refused():
    with pytest.raises(ValueError, match="rates rise from rung to rung"):
        RateLadder(rates=(0.1, 0.01))


@pytest.mark.parametrize(("name", "arms"), [("collapse_with_norms", 4), ("stability_map", 10)])
def test_studies_of_the_ladder_run_every_arm_at_every_rate(tmp_path, text, name, arms):
    study = importlib.import_module(f"headwise_papers.{name}").STUDY
    canonical_claims(study)
    assert len(study.arms) == arms and study.scales["small"].seeds >= 8
    for scale in study.scales.values():
        type(study.task)(**study.task.model_dump() | scale.settings)
    small = at_least_size(study, text, study.methods if arms == 4 else study.methods[-4:])
    results = carry(small, tmp_path / "out", data=text)
    assert len(results) == len(small.arms) and all(result["status"] == "finished" for result in results)
    claimed = {test.outcome for claim in study.claims for test in claim.tests if "rate " not in test.outcome}
    for result in results:
        assert claimed <= result["metrics"].keys()
        rungs = [result["metrics"][f"rate {rate:g}/test/loss"] for rate in TINY["rates"]]
        assert result["metrics"]["test/best_loss"] == min(rungs) and rungs[0] != rungs[1]
        for rate in TINY["rates"]:
            assert 0 < result["metrics"][f"rate {rate:g}/health/entropy_share"] <= 1 + 1e-5
            assert 1 <= result["metrics"][f"rate {rate:g}/health/rank"] <= 8 + 1e-3
    lines = (tmp_path / "out" / "runs" / results[0]["hash"] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["phase"] for line in lines] == ["rate 0.01", "rate 0.3"]


def test_every_rung_begins_untrained_and_with_the_same_weights_for_every_arm(tmp_path, text):
    study = importlib.import_module("headwise_papers.collapse_with_norms").STUDY
    arms = ("baseline | weight_decay=0.5",)
    results = carry(at_least_size(study, text, arms, steps=1, rates=(0.01, 0.5, 1.0)), tmp_path / "out", data=text)
    first = []
    for result in results:
        lines = (tmp_path / "out" / "runs" / result["hash"] / "metrics.jsonl").read_text().splitlines()
        first.append([json.loads(line)["metrics"]["train/loss"] for line in lines])
    assert first[0] == first[1] and len(set(first[0])) == 3
    # a model that a step at a rate of 0.5 had moved would be far from the loss of chance
    assert all(abs(loss - math.log(CHARACTERS)) < 0.7 for loss in first[0])
