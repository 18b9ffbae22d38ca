"""What a task may be: each kind of experiment trains a tiny model to a known result, and the core is not touched."""

import math

import pytest
import torch
from small_studies import PLACE, all_numbers, carry, orders, study_of, tiny_study
from torch import nn

from headwise.lab.experiments.evaluation import Evaluation
from headwise.lab.experiments.task_source import load_task
from headwise.lab.training.batches import evaluation_batches, training_batches
from headwise.lab.training.evaluate import evaluate
from headwise.lab.training.execution import execute
from headwise.lab.training.preflight import check_task
from headwise.lab.training.train import Training
from headwise_verdict.files.errors import StudyError

CORE = PLACE.replace("tiny_task.py", "core_tasks.py")


def core_task(name, **settings):
    return load_task(f"{CORE}:{name}")(**settings)


def core_study(name, methods=(), seeds=1, **settings):
    return study_of(f"{CORE}:{name}", methods, seeds, **settings)


@pytest.mark.grid
def test_words_of_different_lengths_are_translated(tmp_path):
    (result,) = carry(core_study("Reverse"), tmp_path)
    metrics = result["metrics"]
    # chance: one in nine for each letter and the end
    assert metrics["test/greedy/exact"] > 0.9
    assert metrics["test/perplexity"] == pytest.approx(math.exp(metrics["test/loss"]))
    assert 1 < metrics["test/perplexity"] < 1.3
    assert metrics["gap/perplexity"] == metrics["train/perplexity"] - metrics["test/perplexity"]


def test_pixels_are_segmented_to_their_mean_iou(tmp_path):
    (result,) = carry(core_study("Segment"), tmp_path)
    # 1/9 is what one class for all pixels gives
    assert result["metrics"]["test/miou"] > 0.8
    assert result["metrics"]["test/loss"] < 0.35


def test_two_views_are_contrasted_and_a_frozen_encoder_is_probed(tmp_path):
    (result,) = carry(core_study("TwoViews"), tmp_path)
    assert result["phases"] == ["contrast", "probe"] and result["epochs"] == 8 + 25
    # four classes that the encoder was never told
    assert result["metrics"]["test/accuracy"] > 0.95
    (folder,) = (tmp_path / "runs").iterdir()
    lines = all_numbers(tmp_path)[folder.name][0]
    contrast = [line["metrics"]["train/loss"] for line in lines if line["phase"] == "contrast"]
    # chance is log 63: each view among all others
    assert contrast[-1] < 3.0 < math.log(63)


@pytest.mark.grid
def test_five_tasks_in_a_row_give_an_accuracy_matrix_and_forgetting(tmp_path):
    (result,) = carry(core_study("FiveTasks"), tmp_path)
    metrics = result["metrics"]
    matrix = [[metrics[f"task {then}/task {n}/accuracy"] for n in range(5)] for then in range(5)]
    # each task is learned when it is there, those to come are unknown, and the earlier ones are forgotten
    assert all(matrix[n][n] > 0.9 for n in range(5))
    assert all(matrix[then][n] < 0.1 for then in range(5) for n in range(then + 1, 5))
    best = [max(matrix[then][n] for then in range(n, 5)) for n in range(4)]
    assert metrics["test/forgetting"] == pytest.approx(
        sum(b - last for b, last in zip(best, matrix[4], strict=False)) / 4
    )
    assert metrics["test/forgetting"] > 0.3


def training_of(task, seed=0):
    from accelerate import Accelerator

    torch.manual_seed(seed)
    model = task.model()
    return Training(task, model, torch.optim.SGD(model.parameters(), lr=0.1), Accelerator(cpu=True), seed)


@pytest.mark.parametrize("name", ["Reverse", "Segment", "Ranks"])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_metrics_are_the_same_for_batches_of_any_size(name, size):
    task = core_task(name)
    examples = task.data("test")
    whole = evaluate(training_of(task), Evaluation("test"), examples)
    parts = evaluate(training_of(core_task(name, evaluation_batch_size=size)), Evaluation("test"), examples)
    assert parts == pytest.approx(whole, rel=1e-5)
    assert {"Reverse": "perplexity", "Segment": "miou", "Ranks": "spearman"}[name] in whole


def test_perplexity_counts_tokens_and_not_sentences():
    task = core_task("Reverse", evaluation_batch_size=3)
    training, examples = training_of(task), task.data("test")
    batch = task.batch(examples, None)
    with torch.no_grad():
        logits = training.model.eval()(**batch.inputs)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    by_hand = losses[batch.targets.flatten() != 0].mean().exp().item()
    assert evaluate(training, Evaluation("test"), examples)["perplexity"] == pytest.approx(by_hand, rel=1e-5)


def test_batches_hold_similar_lengths_within_a_number_of_tokens():
    task = core_task("Reverse", tokens_per_batch=60)
    examples = task.data("train")
    lengths = task.lengths(examples)
    batches = training_batches(task, 1024, lengths, 0, 1)
    assert torch.equal(torch.cat(batches).sort().values, torch.arange(1024))
    padded = [int(lengths[batch].max()) * len(batch) for batch in batches]
    assert max(padded) <= 60 and sum(padded) < 1.02 * int(lengths.sum())
    # the order of batches is drawn too: lengths do not grow through an epoch
    means = torch.tensor([lengths[batch].double().mean() for batch in batches])
    assert abs(torch.corrcoef(torch.stack([means, torch.arange(len(means)).double()]))[0, 1]) < 0.3
    again, other = (training_batches(task, 1024, lengths, 0, epoch) for epoch in (1, 2))
    assert all(torch.equal(one, two) for one, two in zip(batches, again, strict=True))
    assert not torch.equal(torch.cat(batches), torch.cat(other))
    judged = evaluation_batches(task, 1024, lengths, 0, 1)
    assert torch.equal(torch.cat(judged).sort().values, torch.arange(1024))


def test_without_lengths_the_order_is_one_permutation_of_an_epoch():
    from headwise.lab.experiments.configuration import derive

    task = tiny_study().task
    order = torch.randperm(36, generator=torch.Generator().manual_seed(derive(3, "order", 2)))
    assert torch.equal(torch.cat(training_batches(task, 36, None, 3, 2)), order)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Segment", {"tokens_per_batch": 50}, r"tokens_per_batch=50 needs Segment\.lengths"),
        ("Reverse", {"tokens_per_batch": 4}, r"an example of Reverse has 5 tokens, more than tokens_per_batch=4"),
    ],
)
def test_batches_that_cannot_be_made_are_refused(tmp_path, name, settings, message):
    with pytest.raises(StudyError, match=message):
        carry(core_study(name, **settings), tmp_path)


def test_accumulated_batches_take_the_step_of_the_whole_batch(tmp_path):
    # tokens are counted, not batches: the parts differ in padding
    results = []
    for name, settings in (("whole", {"batch_size": 64}), ("parts", {"batch_size": 16, "accumulation": 4})):
        study = core_study("Reverse", epochs=2, evaluation_batch_size=64, **settings)
        carry(study, tmp_path / name)
        results.append(next(iter(all_numbers(tmp_path / name).values())))
    (whole, _), (parts, _) = results
    assert [line["steps"] for line in parts] == [line["steps"] for line in whole] == [16, 16]
    # another grouping by length: the same examples an epoch, not the same batches
    assert parts[-1]["metrics"]["train/loss"] == pytest.approx(whole[-1]["metrics"]["train/loss"], rel=0.05)


def test_accumulation_gives_the_gradients_of_one_batch(tmp_path):
    lines = []
    for name, settings in (("whole", {"batch_size": 18}), ("parts", {"batch_size": 6, "accumulation": 3})):
        carry(
            tiny_study("Still", methods=("NeuTRENO(strength=0.5)",), epochs=2, optimizer="sgd", **settings),
            tmp_path / name,
        )
        lines.append(
            sorted(
                (arm["arm"], [e["metrics"]["train/loss"] for e in found])
                for found, arm in all_numbers(tmp_path / name).values()
            )
        )
    for (one, whole), (other, parts) in zip(*lines, strict=True):
        assert one == other and parts == pytest.approx(whole, rel=1e-5)


def test_steps_decide_instead_of_epochs(tmp_path):
    (result,) = carry(tiny_study(steps=7), tmp_path)
    (found,) = all_numbers(tmp_path).values()
    # 36 examples in batches of 8: five steps an epoch
    assert [line["steps"] for line in found[0]] == [5, 2] and result["steps"] == 7


def test_clipping_and_schedules_change_what_is_trained(tmp_path):
    losses = {}
    for name, settings in {
        "plain": {},
        "clipped": {"clip": 1e-4},
        "cosine": {"schedule": "cosine"},
        "warm": {"warmup": 0.5},
    }.items():
        carry(tiny_study("Still", optimizer="sgd", learning_rate=0.1, weight_decay=0.0, **settings), tmp_path / name)
        (found,) = all_numbers(tmp_path / name).values()
        losses[name] = [line["metrics"]["train/loss"] for line in found[0]]
        rates = [line["learning_rate"] for line in found[0]]
        if name == "cosine":
            assert rates == sorted(rates, reverse=True) and rates[-1] < 0.05
    assert len({tuple(values) for values in losses.values()}) == 4
    # gradients of norm 1e-4 move nothing
    assert losses["clipped"][0] == pytest.approx(losses["clipped"][1], abs=1e-3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "shape",
            r"Faults\.count returned 'pixels' in the shape \(16, 16\) and then \(1, 16\): a sum has the " r"same shape",
        ),
        ("undeclared", r"Faults returned the metric 'iou', which it does not declare; its metrics are miou, loss"),
        (
            "raises",
            r"Faults\.finish could not make the metrics of 'train'.*int64 \(3, 3\).*KeyError: 'confusion matrix'",
        ),
        (
            "undecided",
            r"Faults decides on 'test/miou', and nothing returns it: 'test' returned loss\. Let finish\(\) "
            r"return 'miou'",
        ),
        ("nan", r"the metric 'miou' of 'train' is nan, while the loss is a number"),
    ],
)
def test_a_metric_that_cannot_be_made_fails_its_run_by_name(tmp_path, fault, message):
    (order,) = orders(core_study("Faults", fault=fault), tmp_path)
    with pytest.raises(StudyError, match=message):
        execute(order, lambda event: None)
    # all but the last is known before the first step
    assert (order.folder / "metrics.jsonl").exists() == (fault == "nan")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("twice", "Faults names the evaluation 'fog' twice"),
        ("phases", "Faults names the phase 'one' twice"),
        (
            "missing",
            r"a phase starts from /no/such/folder, which is not a folder, so it contains no "
            r"checkpoint\.safetensors",
        ),
        ("setting", r"phase 'two': Faults .*: learningrate: there is no such setting\. Did you mean 'learning_rate'\?"),
        ("optimizer", r"phase 'two': Faults does not take these settings: optimizer adamw has no momentum\."),
    ],
)
def test_what_a_task_says_wrongly_of_itself_is_refused_before_anything_is_written(tmp_path, fault, message):
    with pytest.raises(StudyError, match=message):
        check_task(core_task("Faults", fault=fault))
    with pytest.raises(StudyError, match=message):
        carry(core_study("Faults", fault=fault), tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()


def test_a_statistic_of_no_such_name_is_refused():
    with pytest.raises(StudyError, match=r"head_statistics: There is no statistic 'entropi'"):
        check_task(core_task("Segment", head_statistics=("entropi",)))


def test_an_outcome_that_decides_and_is_never_given_fails_its_run(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    (order,) = orders(study_of(f"{tmp_path / 'late.py'}:Late"), tmp_path / "out")
    with pytest.raises(StudyError, match=r"Late decides on 'test/right', and nothing returns it: 'test' returned loss"):
        execute(order, lambda event: None)


LATE = """
import torch
from torch import nn
from headwise.study import Evaluation, Metric, Task

class Late(Task):
    epochs: int = 1
    metrics = (Metric("right"),)
    def model(self): return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    def data(self, split): return torch.zeros(6, 4), torch.ones(6).long()
    def evaluations(self): return [Evaluation("test", finish=lambda sums: {"loss": sums["loss"] / sums["weight"]})]
"""

WRONG = """
import torch
from torch import nn
from headwise.study import Task

class Wrong(Task):
    def model(self): return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    def data(self, split): return {data}
    {batch}
"""


@pytest.mark.parametrize(
    ("data", "batch", "message"),
    [
        # ids and a mask, and no labels at all
        (
            "torch.zeros(6, 4), torch.ones(6, 4)",
            "",
            r"Wrong fails on its first 6 training examples, \(float32 \(6, 4\), float32 \(6, 4\)\).*the model returned "
            r"float32 \(6, 3\)",
        ),
        (
            "torch.zeros(6, 4), torch.ones(5)",
            "",
            r"data\('train'\) returned \(float32 \(6, 4\), float32 \(5,\)\): its parts hold 6, 5",
        ),
        ("[1, 2], torch.ones(2)", "", r"\[0\]\[0\] is a int, where a tensor should be"),
        # an argument too many: the inputs are a tuple of their own
        (
            "torch.zeros(6, 4), torch.ones(6, 4), torch.ones(6)",
            "",
            r"Wrong fails on its first 6 training examples, \(float32 \(6, 4\), float32 \(6, 4\), float32 \(6,\)\): "
            r"batch\(\) made "
            r"none.*data\(\) must return \(inputs, targets\)",
        ),
        (
            "['a'] * 1000, torch.ones(1000)",
            "",
            r"returned \(\(str, str, str, str, str, str, and 994 more\), float32 \(1000,\)\)",
        ),
        ("torch.zeros(6, 9), torch.ones(6).long()", "", r"inputs float32 \(6, 9\), targets int64 \(6,\)"),
        (
            "torch.zeros(6, 4), torch.ones(6).long()",
            "def batch(self, examples, generator): return examples",
            r"Wrong\.batch returned \(float32 \(6, 4\), int64 \(6,\)\); return headwise\.study\.Batch",
        ),
    ],
)
def test_data_of_a_wrong_shape_gets_an_error_that_says_what_was_given(tmp_path, data, batch, message):
    (tmp_path / "wrong.py").write_text(WRONG.format(data=data, batch=batch))
    (order,) = orders(study_of(f"{tmp_path / 'wrong.py'}:Wrong"), tmp_path / "out")
    with pytest.raises(StudyError, match=message):
        execute(order, lambda event: None)


HUGGING_FACE = """
import torch
from headwise.study import Task

class Texts(Task):
    epochs: int = 15
    batch_size: int = 16
    learning_rate: float = 3e-3
    {own}
    def model(self):
        from transformers import BertConfig, BertForSequenceClassification
        shape = dict(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        return BertForSequenceClassification(BertConfig(**shape, num_labels=2))

    def data(self, split):
        generator = torch.Generator().manual_seed(len(split))
        ids = torch.randint(2, 20, (128, 6), generator=generator)
        labels = torch.randint(2, (128,), generator=generator)
        ids[:, 1] = labels
        return {{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}}
"""


@pytest.mark.parametrize(
    "own",
    [
        "",
        "def batch(self, examples, generator):\n        from headwise.study import Batch\n        return "
        "Batch(examples, examples['labels'])\n",
    ],
)
def test_a_hugging_face_model_needs_no_wrapper(tmp_path, own):
    pytest.importorskip("transformers")
    (tmp_path / "texts.py").write_text(HUGGING_FACE.format(own=own))
    results = carry(study_of(f"{tmp_path / 'texts.py'}:Texts", ("DropHead(p=0.1)",)), tmp_path / "out")
    assert [result["metrics"]["test/accuracy"] > 0.9 for result in results] == [True, True]


@pytest.mark.parametrize("inputs", ["examples[0]", "(examples[0],)", "{'x': examples[0]}", "({'x': examples[0]},)"])
def test_inputs_are_one_tensor_arguments_keywords_or_a_dict(inputs):
    from headwise.lab.training.batches import run_model

    class Model(nn.Module):
        def forward(self, x):
            return (x["x"] if isinstance(x, dict) else x) + 1

    examples = (torch.zeros(2), torch.zeros(2))
    assert torch.equal(run_model(Model(), eval(inputs, {"examples": examples})), torch.ones(2))
