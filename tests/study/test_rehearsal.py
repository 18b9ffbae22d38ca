"""What would be told at the end of a run is told before its first step, by name."""

import pytest
import torch
from small_studies import PLACE, carry, orders, study_of

from headwise.lab.training import rehearsal
from headwise.lab.training.execution import execute
from headwise_verdict.files.errors import StudyError

LATE = PLACE.replace("tiny_task.py", "late_tasks.py")


@pytest.fixture(autouse=True)
def nothing_passed_before():
    rehearsal._passed.clear()


def late(**settings):
    return study_of(f"{LATE}:Late", **settings)


def refused(study, out, message):
    (order,) = orders(study, out)
    with pytest.raises(StudyError, match=message) as told:
        execute(order, lambda event: None)
    assert str(told.value).count("phase 'two'") <= 1
    # before the first step
    assert not (order.folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("split", r"Late\.data\('foggy'\) fails: KeyError: 'foggy' \(line \d+ of late_tasks\.py, in data\)"),
        ("count", r"Late fails in the evaluation 'fog' of \(float32 \(16, 1, 4, 4\).*in count_of_fog\)"),
        ("summary", r"Late\.summary could not derive its outcomes from .*fog/accuracy.*KeyError: 'fogg/accuracy'"),
        ("summary of phases", r"Late\.summary .*two/fog/accuracy.*KeyError: 'three/fog/accuracy'"),
        ("epochs", r"Late\.over_epochs could not derive its outcomes from .*validation/accuracy.*'test/accuracy'"),
        ("learn", r"phase 'two' learns hed\.\*, which matches no parameter of the model: "),
        ("carry", r"phase 'two' cannot start from phase 'one': no weight of the model matches \('hed\.\*',\)"),
        ("missing weight", r"phase 'two' cannot start from phase 'one': its head\.\w+ is \(4,.*the model's \(3,"),
        ("data", r"phase 'two': Late\.data\('adapt'\) fails: KeyError: 'adapt'"),
        ("empty data", r"phase 'two': Late\.data\('nothing'\) returned None; a task needs training examples"),
        ("batch", r"phase 'two': Late fails on its first 12 training examples, \(float32 \(12,\)"),
    ],
)
def test_what_comes_late_and_is_wrong_is_told_before_the_first_step(tmp_path, fault, message):
    refused(late(fault=fault), tmp_path, message)


def test_a_foreign_or_damaged_checkpoint_of_a_later_phase_is_told_before_the_first_step(tmp_path):
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    refused(late(start=str(tmp_path)), tmp_path / "foreign", r"phase 'two' cannot start from .*it has no ")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    refused(
        late(start=str(tmp_path)),
        tmp_path / "damaged",
        r"phase 'two': .*model\.safetensors, from which a phase starts, is damaged",
    )


def test_a_run_that_fails_by_name_lets_the_others_go_on(tmp_path):
    study = study_of(f"{LATE}:Late", ("baseline | fault=summary",))
    with pytest.raises(StudyError, match=r"baseline \| fault=summary, seed 0, could not continue: Late\.summary"):
        carry(study, tmp_path)
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 1


def test_a_figure_that_is_undefined_for_few_examples_alone_is_no_fault_before_training(tmp_path):
    (order,) = orders(late(fault="few"), tmp_path)
    with pytest.raises(StudyError, match=r"Late\.finish could not make the metrics of 'fog'.*ZeroDivisionError"):
        execute(order, lambda event: None)
    # told at the end, by name
    assert (order.folder / "metrics.jsonl").exists()


def test_an_evaluation_that_fails_at_the_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "is_due", lambda order: False)
    monkeypatch.setattr("headwise.lab.training.execution.is_due", lambda order: False)
    (order,) = orders(late(fault="count"), tmp_path)
    with pytest.raises(StudyError, match="Late fails in the evaluation 'fog'"):
        execute(order, lambda event: None)
    assert (order.folder / "metrics.jsonl").exists()


def test_the_rehearsal_changes_no_number_and_is_made_once_in_a_process(tmp_path, monkeypatch):
    (first,) = carry(late(), tmp_path / "with")
    made = []
    monkeypatch.setattr("headwise.lab.training.execution.rehearse", lambda *given: made.append(given))
    (second,) = carry(late(), tmp_path / "without")
    assert not made
    same = {name: value for name, value in first["metrics"].items() if "seconds" not in name}
    assert same == {name: value for name, value in second["metrics"].items() if "seconds" not in name}
