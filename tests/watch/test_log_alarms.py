"""The rules of watch on logs that exist already: which can be applied, what they say, and the exit code."""

import json
import math
import random
import subprocess
import sys

import pytest
import torch
from watched_model import read, sharpen, watched

import headwise
from headwise.health.watching.logs import JsonLines
from headwise_verdict.files.errors import StudyError


def losses(spike_at=None, count=120, level=2.0):
    draw = random.Random(0)
    return [level + draw.gauss(0, 0.05) + (9 if step == spike_at else 0) for step in range(count)]


def csv(path, **columns):
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    path.write_text(",".join(names) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def kinds(found):
    return [(alert["alert"], alert["step"]) for run in found.runs for alert in run.alerts]


def rules(found, run=0):
    return {rule.rule: rule for rule in found.runs[run].rules}


def test_a_loss_is_judged_as_watch_judges_it(tmp_path):
    values = losses(spike_at=80)
    found = headwise.alarms(csv(tmp_path / "log.csv", step=range(120), loss=values))
    watch = headwise.watch(torch.nn.MultiheadAttention(8, 2), every=10_000, closer=None, on_alert=None)
    with pytest.warns(match="no training forward"):
        watch.step(values[0])
    for value in values[1:]:
        watch.step(value)
    assert kinds(found) == [(alert["alert"], alert["step"]) for alert in watch.alerts()] == [("loss_spike", 80)]
    assert found.runs[0].alerts[0]["value"] == pytest.approx(watch.alerts()[0]["value"])
    assert found.code == 3 and headwise.alarms(csv(tmp_path / "b.csv", loss=losses())).code == 0


def test_each_rule_says_whether_it_could_be_applied_and_why_not(tmp_path):
    path = csv(tmp_path / "log.csv", step=range(0, 1200, 10), loss=losses(), **{"a/logit": [9] * 120})
    found = headwise.alarms(path, {"max_logit": "a/logit"})
    own = rules(found)
    assert own["logit_growth"].columns == ("a/logit",) and own["logit_growth"].values == 120
    assert own["loss_spike"].why == "each is compared with 50 values over 500 steps; in tests every step was read"
    assert own["mask_lost"].columns == ()
    assert own["mask_lost"].why == "no column holds later_keys (--map later_keys=COLUMN)"
    short = rules(headwise.alarms(csv(tmp_path / "short.csv", loss=losses(count=20))))["loss_spike"]
    assert short.why == "it needs 51 logged losses, and there are 20" and not short.columns
    assert "logit_growth: 120 values of a/logit" in str(found) and "Steps 0 to 1,190: no alerts." in str(found)


def test_heads_are_mapped_by_a_pattern_and_named_in_the_alert(tmp_path):
    columns = {f"layer{n}/logit": [9, 9, 200 if n == 1 else 9] for n in range(3)}
    found = headwise.alarms(csv(tmp_path / "log.csv", step=[0, 5, 10], **columns), {"max_logit": "layer*/logit"})
    (alert,) = found.runs[0].alerts
    assert alert["sentence"] == "the largest logit of layer1/logit passed 100 (now 200) within 5 steps"


def test_a_health_log_gives_the_alerts_of_its_watch(tmp_path):
    log = JsonLines(tmp_path / "health.jsonl")
    model, watch = watched(log=log, statistics=None)
    for factor in (1, 3, 3, 3, 3):
        sharpen(model, factor)
        read(model, watch)
    watch.remove()
    found = headwise.alarms(tmp_path / "health.jsonl")
    assert len(watch.alerts()) > 5
    place = lambda alert: (alert["step"], alert["alert"], alert["site"], alert["head"], alert["statistic"])
    assert sorted(map(place, found.runs[0].alerts), key=str) == sorted(map(place, watch.alerts()), key=str)


def test_a_state_of_the_trainer_is_read_with_its_nan(tmp_path):
    history = [{"step": 10 * n, "loss": 2.0, "grad_norm": 1.0} for n in range(5)] + [{"step": 50, "eval_loss": 2.0}]
    history += [{"step": 60, "loss": 0.0, "grad_norm": math.nan}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"best_metric": None, "log_history": history}))
    found = headwise.alarms(tmp_path / "trainer_state.json")
    assert kinds(found) == [("not_finite", 60)]
    assert found.runs[0].alerts[0]["sentence"] == "gradient norm of model is nan: the training diverged within 20 steps"


def test_a_chart_of_weights_and_biases_has_a_run_in_each_column(tmp_path):
    columns = {"Step": range(120), "good - train/loss": losses(), "good - train/loss__MIN": losses(spike_at=70)}
    columns |= {"bad - train/loss": losses(spike_at=90)}
    found = headwise.alarms(csv(tmp_path / "chart.csv", **columns))
    assert [(run.run, len(run.alerts)) for run in found.runs] == [("good", 0), ("bad", 1)]
    assert "bad, steps 0 to 119: 1 alert." in str(found)


def test_runs_of_one_table_are_judged_apart(tmp_path):
    path = csv(
        tmp_path / "runs.csv",
        run=["a"] * 60 + ["b"] * 60,
        step=[*range(60)] * 2,
        loss=[*losses(count=60), *losses(count=60, level=9)],
    )
    # the first losses of b are far from the last of a
    assert [run.run for run in headwise.alarms(path).runs] == ["a", "b"] and not kinds(headwise.alarms(path))


def test_event_files_of_a_folder_are_runs(tmp_path):
    for name, spike in (("one", None), ("two", 100)):
        writer = headwise.TensorBoard(tmp_path / name).target
        for step, value in enumerate(losses(spike_at=spike)):
            writer.add_scalar("train/loss", value, step)
        writer.close()
    found = headwise.alarms(tmp_path)
    assert [(run.run, len(run.alerts)) for run in found.runs] == [("one", 0), ("two", 1)]
    (file,) = (tmp_path / "two").iterdir()
    assert kinds(headwise.alarms(file)) == [("loss_spike", 100)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(StudyError, match="holds no TensorBoard event file"):
        headwise.alarms(tmp_path / "empty")


def test_what_a_restarted_run_logged_again_counts_once(tmp_path):
    first, again = losses(spike_at=95, count=100), losses(count=40)
    path = csv(tmp_path / "log.csv", step=[*range(100), *range(90, 130)], loss=[*first, *again])
    found = headwise.alarms(path)
    assert not kinds(found)
    assert found.notes == ("loss: 10 values were logged again after a restart; the later ones count",)


@pytest.mark.parametrize(
    ("names", "settings", "match"),
    [
        ({"los": "loss"}, {}, "no rule reads it. Did you mean 'loss'"),
        ({"loss": "los"}, {}, r"has no such column. Did you mean 'loss'\? Columns: loss"),
        ({}, {"step": "time"}, "--step time: .* has no such column"),
        ({}, {"run": "name"}, "--run name: .* has no such column"),
    ],
)
def test_names_that_do_not_exist_are_refused(tmp_path, names, settings, match):
    with pytest.raises(StudyError, match=match):
        headwise.alarms(csv(tmp_path / "log.csv", step=range(3), loss=[1, 2, 3]), names, **settings)


def test_a_log_without_a_figure_that_a_rule_reads_is_refused(tmp_path):
    with pytest.raises(StudyError, match=r"no rule can be applied. Name the columns: --map loss=COLUMN"):
        headwise.alarms(csv(tmp_path / "log.csv", step=range(3), accuracy=[1, 2, 3]))
    with pytest.raises(StudyError, match="line 3: step is 'x', which is not a step"):
        headwise.alarms(csv(tmp_path / "log.csv", step=[0, "x"], loss=[1, 2]))


def test_the_command_prints_or_gives_json_and_ends_with_three(tmp_path):
    path = csv(tmp_path / "log.csv", step=range(120), **{"my/loss": losses(spike_at=80)})

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "headwise", "alarms", str(path), *arguments], capture_output=True, text=True
        )

    done = run("--map", "loss=my/loss")
    assert done.returncode == 3 and "Step 80 (healthy at step 79): the loss rose to" in done.stdout
    done = run("--map", "loss=my/loss", "--json")
    content = json.loads(done.stdout)
    assert (done.returncode, content["schema"], content["code"]) == (3, "headwise.alarms/1", 3)
    assert content["runs"][0]["alerts"][0]["step"] == 80
    done = run("--map", "loss")
    assert done.returncode == 1 and "write NAME=COLUMN" in done.stderr and not done.stdout


def test_names_of_runs_may_hold_the_mark_between_a_run_and_its_figure(tmp_path):
    columns = {"Step": range(120), "lr 1e-3 - seed 1 - train/loss": losses(spike_at=90)}
    (run,) = headwise.alarms(csv(tmp_path / "chart.csv", **columns)).runs
    assert (run.run, [alert["step"] for alert in run.alerts]) == ("lr 1e-3 - seed 1", [90])


def test_a_scalar_that_is_written_as_a_tensor_is_read(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step, value in enumerate(losses(spike_at=90)):
            writer.add_scalar("train/loss", value, step, new_style=True)
    assert kinds(headwise.alarms(tmp_path)) == [("loss_spike", 90)]


def test_usual_names_are_found_in_nested_objects(tmp_path):
    rows = [{"step": step, "train": {"loss": value}} for step, value in enumerate(losses(spike_at=90))]
    (path := tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert kinds(headwise.alarms(path)) == [("loss_spike", 90)]


def test_event_files_without_a_scalar_are_refused(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(StudyError, match="its event files hold no scalars"):
        headwise.alarms(tmp_path)
