"""Tasks that do what a user may well do: the core gives right numbers for them, or says by name what cannot be."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_studies import carry, orders, study_of

from headwise.lab.comparing.plan import check_arms
from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.task_source import load_task
from headwise.lab.training.execution import execute
from headwise_verdict.files.errors import StudyError

PLACE = str(Path(__file__).with_name("awkward_tasks.py"))


def figures(result):
    return {name: value for name, value in result["metrics"].items() if not name.startswith("cost/")}


def test_what_batch_writes_in_place_reaches_no_later_batch(tmp_path):
    study = study_of(f"{PLACE}:Copied", watch_every=2, watch_statistics=("sharpness",), epochs=3)
    (copied,) = carry(study, tmp_path / "copied", watch=True)
    study = study_of(f"{PLACE}:InPlace", watch_every=2, watch_statistics=("sharpness",), epochs=3)
    (in_place,) = carry(study, tmp_path / "in place", watch=True)
    assert "watched/sharpness/last" in copied["metrics"]
    assert figures(in_place) == figures(copied)


def test_examples_may_be_a_named_tuple(tmp_path):
    (named,), (plain,) = (carry(study_of(f"{PLACE}:{name}"), tmp_path / name) for name in ("Paired", "Images"))
    assert figures(named) == figures(plain)


def test_costs_heads_and_maps_are_read_with_the_deciding_evaluations_own_batch(tmp_path):
    (result,) = carry(study_of(f"{PLACE}:JudgedOtherwise"), tmp_path)
    assert {"cost/inference_seconds_per_example", "heads/attention_entropy/mean"} <= result["metrics"].keys()
    assert list(tmp_path.glob("runs/*/maps.json"))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("UndefinedBetween", "the metric 'odd' of 'test' is nan, while the loss is a number"),
        ("UndefinedSummary", r"UndefinedSummary derived 'all/accuracy' as nan"),
    ],
)
def test_an_undefined_figure_of_a_phase_or_a_summary_fails_the_run_by_name(tmp_path, task, message):
    with pytest.raises(StudyError, match=message):
        carry(study_of(f"{PLACE}:{task}"), tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no module", r"Faulty\.model\(\) returned function; return a torch\.nn\.Module"),
        ("nothing", r"Faulty\.model\(\) returned None"),
        ("raises", r"Faulty\.model\(\) fails: ZeroDivisionError: .* \(line \d+ of awkward_tasks.py"),
        ("no parameters", r"Faulty\.model\(\) returned a Flatten without parameters"),
        ("detached", r"Faulty\.loss returned float32 \(\) that has no gradient"),
    ],
)
def test_what_cannot_be_trained_is_told_in_a_sentence(tmp_path, fault, message):
    (order,) = orders(study_of(f"{PLACE}:Faulty", fault=fault), tmp_path)
    # the penalty of a method would have a gradient where the loss has none
    order = dataclasses.replace(
        order, configuration=order.configuration.model_copy(update={"arm": "AttentionNormPenalty()"})
    )
    with pytest.raises(StudyError, match=message):
        execute(order, lambda event: None)


def test_an_arm_whose_trials_all_diverge_keeps_its_setting_and_says_so(tmp_path):
    arm = "baseline | fault=nan"
    carry(study_of(f"{PLACE}:Faulty", (arm,)), tmp_path, trials=2)
    notes = json.loads((tmp_path / "study.json").read_text())["notes"]
    assert notes[0].startswith("baseline: 2 trials on validation chose baseline with")
    assert notes[1] == f"{arm}: all of 2 trials on validation diverged; it stays {arm} with learning rate 0.001."


def test_the_stream_holds_no_mean_of_a_metric_that_is_counted(tmp_path):
    (result,) = carry(study_of(f"{PLACE}:Explained"), tmp_path)
    (stream,) = tmp_path.glob("runs/*/metrics.jsonl")
    line = json.loads(stream.read_text())
    assert "train/explained" not in line["metrics"] and "validation/explained" in line["metrics"]
    assert result["metrics"]["train/explained"] is not None


def test_an_arm_trains_on_the_splits_of_the_baseline_in_their_order():
    task = load_task(f"{PLACE}:InOrder")()
    with pytest.raises(StudyError, match=r"\(order\) train it on train b, train a, the baseline on train a, train b"):
        check_arms([read_arm("baseline | order=ba", task)], task)


def test_nothing_that_is_tried_or_measured_exceeds_the_tokens_of_a_batch(tmp_path):
    (result,) = carry(study_of(f"{PLACE}:Bounded"), tmp_path)
    (whole,) = carry(study_of(f"{PLACE}:Images"), tmp_path / "whole")
    # of two or three examples and not of 16
    assert result["metrics"]["cost/flops_per_step"] * 4 < whole["metrics"]["cost/flops_per_step"]


def test_every_file_of_a_task_and_every_arms_own_checkpoint_is_part_of_the_identity(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "words.txt").write_text(name)

    def identities(study):
        return [order.identity for order in orders(study, tmp_path / "out")]

    before = identities(study_of(f"{PLACE}:TwoOfOneName", start=tmp_path))
    (tmp_path / "a" / "words.txt").write_text("another")
    assert identities(study_of(f"{PLACE}:TwoOfOneName", start=tmp_path)) != before

    carry(study_of(f"{PLACE}:Images"), tmp_path / "trained")
    (run,) = (tmp_path / "trained").glob("runs/*")
    for name in "ab":
        (tmp_path / name / "model.safetensors").write_bytes((run / "checkpoint.safetensors").read_bytes())
    arm = f'baseline | start="{tmp_path / "b"}"'
    baseline, before = identities(study_of(f"{PLACE}:Started", (arm,), start=tmp_path / "a"))
    with open(tmp_path / "b" / "model.safetensors", "ab") as file:
        file.write(b" ")
    assert identities(study_of(f"{PLACE}:Started", (arm,), start=tmp_path / "a"))[0] == baseline
    assert identities(study_of(f"{PLACE}:Started", (arm,), start=tmp_path / "a"))[1] != before


# make test trains in two processes in test_several_processes.py
@pytest.mark.grid
def test_two_processes_train_single_examples_and_judge_by_parts_of_the_model(tmp_path):
    command = [sys.executable, "-m", "headwise.cli", "compare", "--task", f"{PLACE}:Lone", "--seeds", "1"]
    command += [
        "--method",
        "RelaxedAttention(gamma=0.2)",
        "--processes",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "two"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    two = {found["arm"]: found for found in map(_result, (tmp_path / "two").glob("runs/*"))}
    for one in carry(study_of(f"{PLACE}:Lone", ("RelaxedAttention(gamma=0.2)",)), tmp_path / "one"):
        found = figures(two[one["arm"]])
        assert two[one["arm"]]["steps"] == one["steps"] == 6
        assert {"one/loss", "parts/accuracy"} <= found.keys() == figures(one).keys()
        assert found == pytest.approx(figures(one), rel=1e-4)


def _result(folder):
    return json.loads((folder / "result.json").read_text())
