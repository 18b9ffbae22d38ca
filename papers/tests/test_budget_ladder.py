"""A ladder of rates with budgets: steps to a target lie between budgets, which begin alike, and the study runs."""

from __future__ import annotations

import pytest
from headwise_papers.optimizers_by_head import STUDY
from headwise_papers.tasks.budget_ladder import BudgetLadder, steps_to
from small_studies import carry

from headwise.lab.comparing.claim_check import canonical_claims

TINY = {
    "rates": (0.01, 0.3),
    "budgets": (2, 4),
    "dim": 8,
    "heads": 2,
    "depth": 1,
    "context": 8,
    "steps": 4,
    "batch_size": 4,
    "test_size": 12,
}


def test_the_steps_to_a_target_lie_on_the_line_between_two_budgets():
    assert steps_to(2.5, (40, 80), [3.0, 2.0]) == pytest.approx(60)
    assert steps_to(2.5, (40, 80, 160), [3.0, 2.75, 2.25]) == pytest.approx(120)
    assert steps_to(2.5, (40, 80), [2.4, 2.0]) == 40
    assert steps_to(2.5, (40, 80), [3.0, 2.6]) == 80


def test_the_summary_takes_the_fewest_steps_of_any_rate_and_the_ladder_of_the_largest_budget():
    task = BudgetLadder(rates=(0.01, 0.1), budgets=(40, 80), level=3.0, target=2.5, steps=80)
    losses = {"rate 0.01 for 40 steps": 3.0, "rate 0.01": 2.0, "rate 0.1 for 40 steps": 2.6, "rate 0.1": 2.4}
    found = task.summary({f"{name}/test/loss": loss for name, loss in losses.items()})
    assert found["test/best_loss"] == 2.0
    assert found["test/steps_to_target"] == pytest.approx(60)


@pytest.mark.parametrize("budgets", [(40,), (80, 40), (0, 10)])
def test_budgets_that_do_not_rise_are_refused(budgets):
    with pytest.raises(ValueError, match="budgets rise, two at least"):
        BudgetLadder(budgets=budgets)


def test_the_study_runs_every_arm_at_every_rate_and_budget(text, tmp_path):
    task = BudgetLadder(**STUDY.task.model_dump() | TINY).located(text)
    small = STUDY.model_copy(update={"task": task, "seeds": 1, "claims": (), "premises": ()})
    results = carry(small, tmp_path / "a", data=text)
    assert len(results) == len(STUDY.methods) + 1 == 13
    assert all(result["status"] == "finished" for result in results)
    for result in results:
        assert 2 <= result["metrics"]["test/steps_to_target"] <= 4
        short, long = (result["metrics"][f"{name}/test/loss"] for name in ("rate 0.01 for 2 steps", "rate 0.01"))
        assert short != long
    # a budget is the beginning of the next one
    plain = results[0]["metrics"]
    both = BudgetLadder(**STUDY.task.model_dump() | TINY | {"budgets": (2, 3), "steps": 3}).located(text)
    again = carry(small.model_copy(update={"task": both, "methods": STUDY.methods[:1]}), tmp_path / "b", data=text)
    name = "rate 0.01 for 2 steps/test/loss"
    assert again[0]["metrics"][name] == plain[name]


def test_the_claims_name_arms_and_outcomes_of_the_study():
    canonical_claims(STUDY)
    claimed = {test.outcome for claim in STUDY.claims for test in claim.tests if "rate " not in test.outcome}
    assert claimed == {"test/best_loss", "test/critical_rate", "test/steps_to_target"}


def test_the_study_of_steps_has_a_target_that_the_first_budgets_do_not_reach_and_the_last_can():
    from headwise_papers.optimizers_by_head_steps import STUDY as STEPS_STUDY

    task = STEPS_STUDY.task
    assert task.target < STUDY.task.target and task.budgets[-1] == task.steps == 4 * STUDY.task.steps
    # every comparison of steps needs a target that takes work and can be reached
    assert all({"the target takes work", "the target is reached"} < {*claim.needs} for claim in STEPS_STUDY.claims)
    assert {claim.tests[0].outcome for claim in STEPS_STUDY.claims} == {"test/steps_to_target"}
