"""One run: what it writes, what makes it the same or another, how it ends."""

import json
import math

import pytest
import torch
from small_studies import PLACE, Silent, all_numbers, carry, numbers, orders, tiny_study

from headwise import parameter_groups
from headwise.lab.experiments.configuration import derive
from headwise.lab.experiments.task_source import load_task
from headwise.lab.training import splits as examples
from headwise.lab.training.execution import execute
from headwise_verdict.files.errors import StudyError


def test_a_run_leaves_its_configuration_its_stream_its_checkpoint_and_its_result(tmp_path):
    (result,) = carry(tiny_study(), tmp_path)
    folder = tmp_path / "runs" / result["hash"]
    stream = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in stream] == [1, 2, 3]
    assert stream[-1]["step"] == 15 == result["steps"]
    assert json.loads((folder / "config.json").read_text())["seed"] == 0
    assert (folder / "checkpoint.safetensors").exists() and not (folder / "checkpoint.previous.safetensors").exists()
    metrics = result["metrics"]
    assert 0 <= metrics["test/accuracy"] <= 1
    assert metrics["validation/loss"] == stream[-1]["metrics"]["validation/loss"]
    assert metrics["gap/loss"] == metrics["train/loss"] - metrics["test/loss"]
    assert metrics["cost/peak_memory_bytes"] > 1000 and metrics["cost/seconds_per_step"] > 0
    assert metrics["cost/parameters"] == sum(p.numel() for p in tiny_study().task.model().parameters())


def test_the_loss_of_the_stream_is_the_loss_of_a_bare_loop(tmp_path):
    study = tiny_study(epochs=2)
    carry(study, tmp_path)
    (found,) = all_numbers(tmp_path).values()
    task = study.task
    torch.manual_seed(derive(0, "weights"))
    model = task.model()
    optimizer = torch.optim.AdamW(parameter_groups(model, task.learning_rate, task.weight_decay))
    inputs, targets = task.data("train")
    for epoch in (1, 2):
        order = torch.randperm(36, generator=torch.Generator().manual_seed(derive(0, "order", epoch)))
        augment = torch.Generator().manual_seed(derive(0, "augment", epoch, 0))
        torch.manual_seed(derive(0, "model", epoch, 0))
        total = 0.0
        for index in order.split(8):
            loss = task.loss(model(task.transform(inputs[index], augment)), targets[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index) / 36
        assert found[0][epoch - 1]["metrics"]["train/loss"] == pytest.approx(total, rel=1e-6)


def test_all_methods_of_a_seed_share_weights_order_and_examples_and_other_seeds_do_not(tmp_path):
    # a method at its neutral setting shows whether anything else differs
    study = tiny_study(methods=("DropHead(p=0.0)",), seeds=2, train_size=20)
    carry(study, tmp_path)
    found = {(result["arm"], result["seed"]): lines for lines, result in all_numbers(tmp_path).values()}
    losses = {key: [line["metrics"]["train/loss"] for line in lines] for key, lines in found.items()}
    assert losses["baseline", 0] == pytest.approx(losses["DropHead(p=0.0)", 0], abs=1e-6)
    assert abs(losses["baseline", 0][0] - losses["baseline", 1][0]) > 1e-3


def test_a_method_that_draws_shifts_no_other_draw(tmp_path):
    study = tiny_study(methods=("DropHead(p=0.5)",), epochs=1, batch_size=36)
    carry(study, tmp_path)
    seen = []
    for order in orders(study, tmp_path / "again"):
        execute(order, lambda event: None)
        seen.append(torch.rand(1).item())
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"epochs": 4}},
        {"settings": {"train_size": 9}},
        {"settings": {"learning_rate": 2e-3}},
        {"settings": {"dtype": "bfloat16"}},
        {"purpose": "trial"},
    ],
)
def test_whatever_changes_a_number_changes_the_identity(changes):
    study = tiny_study()
    assert study.configuration("baseline", 0, **changes).identity != study.configuration("baseline", 0).identity


@pytest.mark.parametrize("field", [{"threads": 2}, {"device": "cuda"}, {"processes": 2}, {"name": "x"}])
def test_how_a_study_computes_is_part_of_the_identity(field):
    study = tiny_study()
    other = study.model_copy(update=field)
    assert other.configuration("baseline", 0).identity != study.configuration("baseline", 0).identity


def test_method_and_seed_are_part_of_the_identity():
    study = tiny_study()
    identities = {study.configuration(arm, seed).identity for arm in ("baseline", "DropHead(p=0.2)") for seed in (0, 1)}
    assert len(identities) == 4


def test_an_edited_task_file_is_another_task(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "from tiny_task import Tiny\nfrom headwise.study import Task\n\n\nclass Mine(Task):\n    model = Tiny.model\n "
        "   data = Tiny.data\n    log: str | None = None\n"
    )
    study = tiny_study()
    before = study.model_copy(update={"task": load_task(f"{source}:Mine")(), "task_place": f"{source}:Mine"})
    identity = before.configuration("baseline", 0).identity
    source.write_text(source.read_text() + "# changed\n")
    assert before.configuration("baseline", 0).identity != identity


def test_a_task_file_edited_while_its_study_runs_is_refused(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text((tmp_path / PLACE).read_text())
    study = tiny_study().model_copy(update={"task_place": f"{source}:Tiny"})
    (order,) = orders(study, tmp_path)
    source.write_text(source.read_text() + "# changed\n")
    with pytest.raises(StudyError, match=r"mine\.py changed while the study runs"):
        execute(order, lambda event: None)


def test_the_content_of_the_files_a_task_names_is_part_of_the_identity(tmp_path):
    text = tmp_path / "text.txt"
    source = tmp_path / "reads.py"
    source.write_text(
        "from pathlib import Path\nfrom headwise.study import Task\n\n\nclass Reads(Task):\n    text: str\n\n"
        "    def files(self):\n        return [Path(self.text)]\n\n    def model(self): ...\n\n    def data(self, "
        "split): ...\n"
    )

    def identity():
        task = load_task(f"{source}:Reads")(text=str(text))
        study = tiny_study().model_copy(update={"task": task, "task_place": f"{source}:Reads"})
        return study.configuration("baseline", 0).identity

    with pytest.raises(StudyError, match=r"Reads reads .*text\.txt, which does not exist"):
        identity()
    text.write_text("one")
    first = identity()
    text.write_text("two")
    assert identity() != first


def test_a_run_that_diverges_is_a_result_with_its_step(tmp_path):
    import sys

    study = tiny_study("Exploding")
    (sys.modules[type(study.task).__module__]).count[0] = 0
    (result,) = carry(study, tmp_path)
    assert (result["status"], result["divergence"]["step"]) == ("diverged", 6)
    assert result["metrics"]["test/accuracy"] is None and result["steps"] == 6
    lines, _ = numbers(tmp_path / "runs" / result["hash"])
    assert [line["metrics"]["train/loss"] is None for line in lines] == [False, True]


def test_a_model_that_ends_with_nan_weights_has_diverged_at_its_last_step(tmp_path, monkeypatch):
    import headwise.lab.training.outcome as outcome

    monkeypatch.setattr(outcome, "evaluate", lambda *_: {"loss": math.nan, "accuracy": 0.5})
    (result,) = carry(tiny_study(epochs=1), tmp_path)
    assert (result["status"], result["divergence"]["step"]) == ("diverged", 5)


def test_the_test_split_is_asked_for_once_and_last(tmp_path):
    carry(tiny_study(log=str(tmp_path / "log")), tmp_path / "out")
    assert (tmp_path / "log").read_text().split() == ["train", "validation", "test"]


def test_a_trial_holds_out_training_examples_and_never_sees_the_test_split():
    from headwise.lab.training.splits import training_examples

    study = tiny_study("Unseen")
    train, validation = training_examples(study.task, study.configuration("baseline", 0, purpose="trial"))
    kept, held = set(train[0][:, 0, 0, 0].tolist()), set(validation[0][:, 0, 0, 0].tolist())
    assert (len(kept), len(held), kept & held) == (8, 8, set())
    assert training_examples(study.task, study.configuration("baseline", 0))[1] is None


def test_each_seed_draws_its_own_training_examples_the_same_for_all_methods():
    from headwise.lab.training.splits import training_examples

    study = tiny_study(train_size=6, methods=("DropHead(p=0.2)",))

    def drawn(arm, seed):
        return training_examples(study.task, study.configuration(arm, seed))[0][0]

    assert len(drawn("baseline", 0)) == 6
    assert torch.equal(drawn("baseline", 0), drawn("DropHead(p=0.2)", 0))
    assert not torch.equal(drawn("baseline", 0), drawn("baseline", 1))


def test_a_test_size_takes_the_same_examples_for_all_runs(tmp_path):
    whole = examples.held_out_examples(tiny_study().task)
    few = examples.held_out_examples(tiny_study(test_size=5).task)
    assert len(few[0]) == len(few[1]) == 5
    places = [int((whole[0] == one).flatten(1).all(1).nonzero()[0]) for one in few[0]]
    assert len(set(places)) == 5 and torch.equal(whole[1][places], few[1])
    assert all(
        torch.equal(a, b) for a, b in zip(few, examples.held_out_examples(tiny_study(test_size=5).task), strict=True)
    )
    with pytest.raises(StudyError, match=f"test_size 999 is more than the {len(whole[0])} test examples of Tiny"):
        examples.held_out_examples(tiny_study(test_size=999).task)


def test_a_train_size_that_is_too_large_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(StudyError, match="train_size 99 is more than the 36 training examples of Tiny"):
        carry(tiny_study(train_size=99), tmp_path)


def test_a_finished_run_is_not_run_again(tmp_path):
    study, listener = tiny_study(seeds=2), Silent()
    carry(study, tmp_path)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    carry(study, tmp_path, listener=listener)
    assert listener.plans == [(2, 2)] and not listener.ends
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}


def test_a_changed_configuration_never_mixes_with_old_results(tmp_path):
    carry(tiny_study(), tmp_path)
    (old,) = (tmp_path / "runs").iterdir()
    before = (old / "result.json").read_bytes()
    with pytest.raises(StudyError, match=r"holds the study tiny with other settings \(epochs 3\)"):
        carry(tiny_study(epochs=1), tmp_path)
    (result,) = carry(tiny_study(epochs=1), tmp_path / "other")
    assert result["hash"] != old.name and (old / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", '{"status": "finished"}', '{"status": "done", "hash": "HASH", "metrics": {}}', '"HASH"']
    + ['{"status": "finished", "hash": "another", "metrics": {}}', '{"status": "finished", "hash": "HASH"}'],
)
def test_what_is_no_result_of_the_run_does_not_count_as_finished(tmp_path, content):
    study, listener = tiny_study(epochs=1), Silent()
    carry(study, tmp_path)
    before = all_numbers(tmp_path)
    (path,) = tmp_path.glob("runs/*/result.json")
    path.write_text(content.replace("HASH", path.parent.name))
    carry(study, tmp_path, listener=listener)
    assert listener.plans == [(1, 0)] and all_numbers(tmp_path) == before


def test_a_second_start_does_not_relabel_the_results_of_the_first(tmp_path):
    from headwise.lab.comparing.compare import compare
    from headwise.lab.comparing.comparison import Comparison
    from headwise.lab.engines.local import HereEngine

    for commit, seeds in (("first", 2), ("second", 3)):
        environment = {"versions": {"torch": commit}, "commit": commit, "hardware": {}}
        study = tiny_study(epochs=1, seeds=seeds)
        compare(Comparison(study, tmp_path, HereEngine(), Silent(), environment=environment))
    described = json.loads((tmp_path / "study.json").read_text())
    assert (described["commit"], described["versions"]) == ("first", {"torch": "first"})
    assert [(found["runs"], found["commit"]) for found in described["environments"]] == [(2, "first"), (1, "second")]
