"""The alarms elsewhere: each script does what it says from its onset on, and the page counts what the runs raised."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch
from headwise_papers.alarms import elsewhere_page, script_faults, scripts
from headwise_papers.alarms.elsewhere import Training, carry_out, main, trainings
from headwise_papers.alarms.models import Digits, Shakespeare, Size
from headwise_papers.alarms.other_models import LONGEST, Sentences
from headwise_papers.alarms.scripts import Script

import headwise
from headwise_verdict.files.ownership import claim

TINY, ONSET, STEPS = Size(8, 1), 3, 6


class Letters(Shakespeare):
    """Characters of a made-up text."""

    batch_size = 8

    def text(self):
        return "the quick brown fox jumps over the lazy dog. " * 40


class Reviews(Sentences):
    """Made-up sentences of twelve words and as much padding."""

    def _all(self):
        draw = torch.Generator().manual_seed(0)
        words = torch.randint(2, 50, (500, LONGEST), generator=draw) * (torch.arange(LONGEST) < 12)
        return words, torch.randint(2, (500,), generator=draw)


def weights_by_step(kind, family, seed=0):
    torch.manual_seed(seed)
    model = family.model(TINY)
    run = kind(family, model, seed, STEPS)
    watch = headwise.watch(model, every=100, on_alert=None, statistics=["max_logit"])
    seen = []
    for step in range(STEPS):
        watch = run.before(step, watch)
        run.step(step)
        watch.step()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    watch.remove()
    return seen


@pytest.mark.parametrize("kind", script_faults.FAULTS, ids=lambda one: one.__name__)
def test_each_fault_of_a_script_changes_the_training_from_its_onset_on(kind, monkeypatch):
    family = Letters(None)
    if not kind.fits(family):
        family = next(one for one in (Reviews(None), Digits(None)) if kind.fits(one))
    monkeypatch.setattr(kind, "onset", ONSET)
    broken, healthy = weights_by_step(kind, family), weights_by_step(Script, family)
    same = [torch.equal(a, b) for a, b in zip(broken, healthy, strict=True)]
    # a schedule that restarts differs before too: it has fallen until then
    if kind is not script_faults.ScheduleRestarts:
        assert all(same[:ONSET])
    assert not same[-1]


@pytest.mark.parametrize("kind", scripts.HEALTHY, ids=lambda one: one.__name__)
def test_each_healthy_script_trains_otherwise_or_resumes_as_if_nothing_was(kind):
    family = Letters(None)
    same = torch.equal(weights_by_step(kind, family)[-1], weights_by_step(Script, family)[-1])
    # gradients below the limit are not clipped
    assert same == (kind in (scripts.Resumed,)) or kind is scripts.Clipped


def made_up(says="as in the study", onset=0, alerts=(), group="fault", evaluated=(), rate=1.0, seed=1):
    return {
        "group": group, "family": "letters", "size": "s", "script": says, "rate": rate, "seed": seed, "onset": onset,
        "steps": 100, "alerts": [list(one) for one in alerts],
        "when made": [[7, "sorted_batches", "waves"]] if group == "usual" else [list(one) for one in alerts],
        "evaluated": list(evaluated) or [[-1, 4.0], [99, 2.0]],
        "seconds": 60.0,
    }  # fmt: skip


def test_the_page_and_its_figures_count_alarms_and_name_what_is_silent(tmp_path):
    twin = [[-1, 4.0], *([step, 2.0] for step in range(9, 100, 10))]
    worse = [[-1, 4.0], *([step, 2.0 + (step > 60)] for step in range(9, 100, 10))]
    runs = [
        made_up(group="usual", rate=0.3, alerts=[(50, "low_rank", "the rank fell"), (50, "redundancy", "alike")]),
        made_up(evaluated=twin),
        made_up("labels", onset=40, evaluated=worse),
        made_up("frozen", onset=40, evaluated=worse, alerts=[(30, "low_rank", "x"), (55, "redundancy", "y")]),
        made_up("harmless", onset=40, evaluated=twin),
    ]
    figures = elsewhere_page.content(runs)
    # two rules at one step are one alarm
    assert figures["any rule"]["false_alarms"] == 1 and figures["any rule"]["healthy_steps"] == 200
    assert figures["low_rank"]["false_alarms"] == 1 and figures["dead_head"]["false_alarms"] == 0
    text = elsewhere_page.page(runs, 9)
    assert "| frozen | letters | 29 | `redundancy` | 15 | – |" in text
    assert "| labels | letters | 29 | nothing | – | – |" in text
    assert "| harmless | letters | never | nothing | – | – |" in text
    assert (
        "Silent although the loss shows them: labels." in text
        and "of today: 1 false alarm in 200 healthy steps" in text
    )
    assert "- letters, as in the study, rate × 0.3, seed 1, step 50, `low_rank`: the rank fell." in text
    assert "Raised then and no longer: letters, as in the study, rate × 0.3, seed 1, step 7, `sorted_batches`." in text
    assert "5 of 9 planned runs are made" in text
    elsewhere_page.write_rows(tmp_path / "rows.csv", runs)
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["shows"] for row in rows] == ["", "", "69", "69", ""]
    assert rows[3]["alerts"] == "low_rank:30 redundancy:55" and rows[0]["alerts when made"] == "sorted_batches:7"


def test_losses_are_judged_by_todays_rules_and_other_alerts_are_kept():
    noise = torch.randn(90, generator=torch.Generator().manual_seed(3)).clamp(-2, 2)
    losses = (3 + 0.02 * noise + 2 * (torch.arange(90) == 70)).tolist()
    made = [[20, "low_rank", "x"], [60, "sorted_batches", "y"], [80, "loss_spike", "z"], [85, "not_finite", "w"]]
    run = elsewhere_page.judged_again({"losses": losses, "alerts": made})
    assert [alert[:2] for alert in run["alerts"]] == [(20, "low_rank"), (70, "loss_spike"), (85, "not_finite")]
    assert run["when made"] == made


def test_the_plan_has_a_twin_for_each_fault_and_no_seed_of_the_study():
    plan = list(trainings())
    assert len({one.name for one in plan}) == len(plan) and min(one.seed for one in plan) >= 2000
    twins = {(one.family, one.size, one.seed) for one in plan if one.group == "fault" and one.script is Script}
    assert all((one.family, one.size, one.seed) in twins for one in plan if one.group == "fault")


def test_a_run_is_watched_as_shipped_and_written(monkeypatch):
    monkeypatch.setattr(Digits, "batch_size", 4)
    watches, real = [], headwise.watch
    monkeypatch.setattr(headwise, "watch", lambda *a, **k: watches.append((real(*a, **k), k)) or watches[-1][0])
    training = Training("usual", Script, Digits, TINY, 2000, 12)
    run = carry_out(training, Digits(None))
    ((watch, settings),) = watches
    assert settings == {"on_alert": None} and watch.every == 50 and watch.removed
    assert run["steps"] == 12 and len(run["losses"]) == 12 and len(run["evaluated"]) == 2
    json.dumps(run, allow_nan=False)


def test_a_page_that_is_the_users_is_not_overwritten(tmp_path, monkeypatch, capsys):
    claim(tmp_path, ("study.json",))
    (tmp_path / elsewhere_page.PAGE).write_text("mine")
    monkeypatch.setattr(sys, "argv", ["elsewhere", "--out", str(tmp_path), "--page"])
    with pytest.raises(SystemExit):
        main()
    assert elsewhere_page.PAGE in capsys.readouterr().err
    assert (tmp_path / elsewhere_page.PAGE).read_text() == "mine"
