"""The study of entropy collapse: its rules on made-up curves, its arms, and its findings at a small size."""

from __future__ import annotations

import json
import math

import pytest
import torch

import headwise.comparing.report
from headwise.studies import entropy_collapse as study


def test_the_divergence_is_the_first_step_above_one_point_two_times_the_running_minimum():
    assert study.divergence([3.0, 2.0, 2.4, 2.3, 1.0, 1.19, 1.21, 5.0], weight=0.0) == 6
    assert study.divergence([3.0, 2.0, 1.0, 1.1, 1.2], weight=0.0) is None
    assert study.divergence([1.0, 1.0, math.nan]) == 2


def test_one_bad_batch_is_no_divergence_and_a_lasting_rise_is_one():
    steady = [1.0] * 50
    assert study.divergence([*steady, 4.0, *steady]) is None
    # The smoothed loss of a rise from 1 to 2 is 2 - 0.95^n after n steps, and passes 1.2 at n = 5.
    assert study.divergence(steady + [2.0] * 20) == 54


def test_smoothing_starts_at_the_first_loss():
    assert study.smoothed([2.0, 4.0, 2.0]) == pytest.approx([2.0, 2.1, 2.095])


def figure(step, head, value, statistic="entropy_share"):
    return {"step": step, "head": head, "value": value, "statistic": statistic}


def course(alert_steps, losses):
    alerts = [{"alert": "entropy_collapse", "step": step} for step in alert_steps]
    records = [
        figure(0, 0, 0.9),
        figure(0, 1, 0.4),
        figure(5, 0, math.nan),
        figure(5, 1, 0.2),
        figure(5, 1, 70.0, "max_logit"),
    ]
    return {"alerts": [{"alert": "logit_growth", "step": 10}, *alerts], "losses": losses, "records": records}


def test_the_lead_is_the_time_from_the_first_entropy_alert_to_the_divergence():
    losses = [1.0] * 50 + [2.0] * 20
    early, late, silent = (study.judge(course(steps, losses)) for steps in ([30, 40], [60], []))
    assert (early["diverged"], early["alert"], early["lead"]) == (54, 30, 24)
    assert late["lead"] == -6
    # With a weight of 0.8 the smoothed loss 2 - 0.8^n passes 1.2 at n = 2, of the rise at step 50.
    assert (early["quick_lead"], late["quick_lead"], silent["quick_lead"]) == (21, -9, None)
    assert early["rise_at_alert"] == 1.0
    assert late["rise_at_alert"] == pytest.approx(2 - 0.95**11)
    assert (silent["diverged"], silent["alert"], silent["lead"]) == (54, None, None)
    assert early["others"] == {"logit_growth": 10}
    assert early["entropy"] == {0: 0.4, 5: 0.2}
    assert early["largest_logit"] == 70.0


def test_a_run_that_does_not_diverge_has_no_lead():
    healthy = study.judge(course([30], [1.0] * 60))
    assert (healthy["diverged"], healthy["alert"], healthy["lead"]) == (None, 30, None)


@pytest.mark.bits
def test_all_arms_of_a_seed_start_from_the_same_weights_and_batches():
    state = torch.get_rng_state()
    (one, images, labels), (other, _, same) = study.build(3), study.build(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(labels, same)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(one(images[:4]), other(images[:4]))
    another, _, others = study.build(4)
    assert not torch.equal(others, labels)
    assert not torch.equal(another.head.weight, one.head.weight)


def test_what_is_read_is_what_the_alerts_judge():
    from headwise.watching.alerts import Judge, Thresholds

    class Asked(dict):
        names = set()

        def get(self, name, default=None):
            self.names.add(name)
            return default

    judge = Judge(Thresholds())
    for rule in (judge._limits, judge._dead, judge._redundant):
        list(rule(Asked()))
    assert set(study.STATISTICS) == Asked.names


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    said = []
    with pytest.MonkeyPatch.context() as small:
        for name, value in {"WIDTH": 16, "DEPTH": 2, "HEADS": 2, "BATCH": 32, "STEPS": 16, "WARM_UP": 4}.items():
            small.setattr(study, name, value)
        state = torch.get_rng_state()
        found = study.run(tmp_path_factory.mktemp("out"), seeds=2, jobs=1, device="cpu", progress=said.append)
        assert torch.equal(torch.get_rng_state(), state)
    return found, said


def test_every_arm_and_seed_has_its_row_and_its_line(findings):
    found, said = findings
    arms = ["plain", 'SigmaReparam(init="one")', "QKNorm()"]
    by_arm, runs = found["tables"]
    assert [row[0] for row in by_arm["rows"]] == arms
    assert [(row[0], row[1]) for row in runs["rows"]] == [(seed, arm) for seed in (0, 1) for arm in arms]
    assert all(len(row) == len(table["columns"]) for table in found["tables"] for row in table["rows"])
    assert said[0] == "seed 0, plain: did not diverge, no entropy alert"
    assert len(said) == 6


def test_the_answer_tells_what_was_counted(findings):
    answer = findings[0]["paragraphs"][0]
    assert (
        "the plain model diverged in 0 of 2 seeds, and the entropy alert came before the loss showed it in 0;" in answer
    )
    assert "with QKNorm() 0 of 2 runs diverged and 0 raised an alert of any kind" in answer


def test_the_charts_hold_loss_and_lowest_entropy_of_arms_and_seeds(findings):
    charts = findings[0]["charts"]
    assert [chart["series"] for chart in charts] == ["arm", "arm", "seed", "seed"]
    assert {row["step"] for row in charts[0]["data"]} == {row["step"] for row in charts[1]["data"]} == {0, 5, 10, 15}
    assert all(0 < row["lowest entropy share of all heads"] <= 1 for row in charts[1]["data"])
    assert {row["seed"] for row in charts[2]["data"]} == {"seed 0", "seed 1"}


def test_the_findings_become_a_report(findings, tmp_path):
    (tmp_path / "findings.json").write_text(json.dumps(findings[0], allow_nan=False), encoding="utf-8")
    html = headwise.comparing.report.write(tmp_path).read_text(encoding="utf-8")
    assert html.count('data-chart="vega-lite"') == 4
    assert "Every run" in html


def test_a_divergence_that_the_alert_announced_is_told_in_the_answer():
    losses = [1.0] * 50 + [2.0] * 20
    runs = [study.judge(course(steps, losses)) for steps in ([30], [60])]
    runs = [{"seed": seed, "arm": "plain", **one} for seed, one in enumerate(runs)]
    calm = {**study.judge({**course([], [1.0] * 60), "alerts": []}), "seed": 0, "arm": "QKNorm()"}
    answer, rule, _ = study.paragraphs([*runs, calm], 2)
    assert "diverged in 2 of 2 seeds" in answer
    assert "before the loss showed it in 1: -6 to 24 steps (median 9) before it" in answer
    assert "with QKNorm() 0 of 1 runs diverged and 0 raised an alert of any kind" in answer
    assert "at the alert it stood at 1.00 to 1.43 × its running minimum" in rule
    assert "before the divergence in 1 of 2 seeds, -9 to 21 steps (median 6) before it" in rule
    assert "Logit growth was told of 44 steps before the divergence, in 2 of 2 seeds." in rule
