"""What a user sees while a study goes on."""

import io

import pytest
from small_studies import orders, tiny_study

from headwise.lab.comparing import progress as showing
from headwise.lab.comparing.order_queue import describe_failures
from headwise.lab.comparing.progress import Bars, PlainLines, clock, describe_end, title
from headwise_verdict.results.records import Divergence, RunResult

EVENT = {
    "event": "progress",
    "epoch": 2,
    "epochs": 9,
    "done": 0.3,
    "loss": 1.25,
    "metric": 0.5,
    "name": "accuracy",
    "left": 75.0,
}
FIGURES = {"test/loss": 0.5, "test/accuracy": 0.875, "cost/seconds_per_step": 0.1}
RESULT = RunResult(status="finished", arm="baseline", seed=0, hash="", metrics=FIGURES, steps=100)


def two_orders(tmp_path):
    return orders(tiny_study(methods=("DropHead(p=0.2)",)), tmp_path)


def test_plain_lines_count_runs_and_say_how_each_ended(tmp_path):
    first, second = two_orders(tmp_path)
    broken = RESULT.model_copy(update={"divergence": Divergence(step=7)})
    stream = io.StringIO()
    with PlainLines(stream) as display:
        display.plan(3, 1)
        display.hear(first, EVENT)
        display.hear(first, {"event": "done", "result": RESULT})
        display.hear(second, {"event": "note", "text": "a checkpoint is damaged"})
        display.hear(second, {"event": "done", "result": broken})
    assert stream.getvalue().splitlines() == [
        "3 runs, 1 finished already",
        "[2/3] baseline, seed 0: test accuracy 0.8750, test loss 0.5000, 10 s",
        "note: a checkpoint is damaged",
        "[3/3] DropHead(p=0.2), seed 0: diverged at step 7",
    ]


def test_plain_lines_speak_of_a_long_run_now_and_then(tmp_path, monkeypatch):
    (order, _), stream = two_orders(tmp_path), io.StringIO()
    display = PlainLines(stream)
    monkeypatch.setattr(showing, "QUIET", -1.0)
    display.hear(order, EVENT)
    assert stream.getvalue() == "baseline, seed 0: epoch 2/9  1 min 15 s left  loss 1.250  accuracy 0.500\n"


def test_bars_show_all_runs_and_each_running_run(tmp_path):
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    first, second = two_orders(tmp_path)
    with Bars(console) as display:
        display.plan(4, 1)
        display.hear(first, EVENT)
        display.hear(second, EVENT | {"epoch": 3})
        display._live.refresh()
        display.hear(first, {"event": "done", "result": RESULT})
        assert [task.description for task in display._each.tasks] == ["DropHead(p=0.2), seed 0"]
        assert display._all.tasks[0].completed == 2
        display.say("[red]not markup")
    shown = console.file.getvalue()
    assert "1/4" in shown and "epoch 2/9  1 min 15 s left  loss 1.250  accuracy 0.500" in shown
    assert "epoch 3/9" in shown and "[red]not markup" in shown


def test_a_line_of_80_columns_keeps_the_seed_the_bar_and_the_time_that_is_left(tmp_path):
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    study = tiny_study(methods=("DropHead(p=0.3) + RelaxedAttention(gamma=0.2) @ 0-1 | learning_rate=0.0003",), seeds=2)
    with Bars(console) as display:
        display.plan(4, 0)
        display.hear(orders(study, tmp_path)[3], EVENT | {"left": 3700.0})
        display._live.refresh()
    lines = [line for line in console.file.getvalue().splitlines() if "DropHead" in line]
    assert "DropHead(p=0.3) + R…, seed 1 ━" in lines[0] and "  1 h 01 min left" in lines[0], lines


def test_a_trial_is_named_by_its_learning_rate_and_judged_on_validation(tmp_path):
    from dataclasses import replace

    (order, _) = two_orders(tmp_path)
    study = tiny_study()
    trial = replace(
        order, configuration=study.configuration("baseline", 1, purpose="trial", settings={"learning_rate": 0.002})
    )
    assert title(trial) == "trial of baseline, learning rate 0.002"
    metrics = {"test/accuracy": None, "validation/loss": 1.0, "validation/accuracy": 0.25, "cost/seconds_per_step": 0.1}
    result = RESULT.model_copy(update={"metrics": metrics})
    assert describe_end(result).startswith("validation accuracy 0.2500, validation loss 1.0000")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.24, "1.2 s"), (42.4, "42 s"), (75, "1 min 15 s"), (7300, "2 h 01 min")]
)
def test_durations_are_written_as_people_read_them(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [
        ({"validation/loss": 0.5, "validation/accuracy": 0.25}, "validation accuracy 0.2500, validation loss 0.5000"),
        (
            {"after 0/task 0/loss": 2.0, "final/loss": 0.5, "final/accuracy": 0.25},
            "final accuracy 0.2500, final loss 0.5000",
        ),
        ({"segments/mean_iou": 0.5, "cost/parameters": 7.0, "heads/entropy/mean": 1.0}, "segments mean iou 0.5000"),
        ({"cost/seconds_per_step": 0.1}, "10 s"),
        ({}, ""),
    ],
)
def test_a_run_ends_with_the_figures_that_its_study_has(metrics, wanted):
    found = describe_end(RESULT.model_copy(update={"metrics": metrics}))
    assert found == wanted


def test_the_time_that_is_left_is_told_from_the_first_run_on(tmp_path, monkeypatch):
    stream, at = io.StringIO(), [0.0]
    monkeypatch.setattr(showing.time, "monotonic", lambda: at[0])
    (order,) = orders(tiny_study(), tmp_path)
    lines = PlainLines(stream)
    lines.plan(12, 2)
    for seconds in (60.0, 70.0, 130.0):
        at[0] = seconds
        lines.hear(order, {"event": "done", "result": RESULT})
    said = [line for line in stream.getvalue().splitlines() if "left" in line]
    assert said == ["runs 3/12, about 9 min 00 s left", "runs 5/12, about 5 min 03 s left"]


def test_trials_say_how_many_runs_follow_at_80_columns(tmp_path, monkeypatch):
    from rich.console import Console

    order = two_orders(tmp_path)[1]
    done = {"event": "done", "result": RESULT}
    stream, at = io.StringIO(), [0.0]
    monkeypatch.setattr(showing.time, "monotonic", lambda: at[0])
    lines = PlainLines(stream)
    lines.plan(24, 2, 54)
    at[0] = 60.0
    lines.hear(order, done)
    assert stream.getvalue().splitlines()[::2] == [
        "trials 2/24 · runs 0/54",
        "trials 3/24 · runs 0/54, about 21 min 00 s left",
    ]
    console = Console(file=io.StringIO(), width=80)
    with Bars(console) as display:
        display.plan(24, 2, 54)
        display.hear(order, EVENT)
        display.hear(order, done)
    shown = console.file.getvalue()
    assert "trials 3/24 · runs 0/54" in shown and "left" in shown and max(map(len, shown.splitlines())) <= 80


def test_a_failure_is_one_line_with_its_place_and_the_details_lie_in_a_log(tmp_path):
    (order,) = orders(tiny_study(), tmp_path)
    order.folder.mkdir(parents=True)
    trace = (
        'Traceback (most recent call last):\n  File "/a/mine.py", line 7, in loss\n    1 / 0\n  File '
        '"/x/site-packages/torch/y.py", line 3, in z\n'
    )
    event = {"event": "failed", "reason": "ZeroDivisionError: division by zero", "trace": trace}
    said = describe_failures([(order, event)] * 4).splitlines()
    assert (
        said[0] == "baseline, seed 0, could not continue: ZeroDivisionError: division by zero (line 7 of mine.py, in "
        "loss) (the "
        "same in 3 other runs)"
    )
    assert "Traceback" not in "".join(said) and str(tmp_path / "failures.log") in said[2]
    assert "site-packages" in (tmp_path / "failures.log").read_text()


def test_a_long_step_is_told_without_a_power_of_ten():
    from types import SimpleNamespace

    from headwise_verdict.results.table import _costs

    arms = [SimpleNamespace(label=label, costs={"seconds_per_step": time}) for label, time in (("A", 3.02), ("B", 3.1))]
    assert _costs(SimpleNamespace(arms=arms, cost_is_indicative=False)) == [
        "A step takes 3,020 ms (A) to 3,100 ms (B)."
    ]
