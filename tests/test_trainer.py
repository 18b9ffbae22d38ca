"""transformers.Trainer: the callback and the loss function, including gradient accumulation."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import partial

import pytest
import torch
from tiny_models import FAMILIES
from torch import Tensor, nn

import headwise
from headwise import DropHead, EntropyPenalty, NeuTRENO, ProductDecay
from headwise.attend.regularizing.transformers_trainer import compute_loss_func

transformers = pytest.importorskip("transformers")

RATE = 0.5


def rows(count: int, tokens: int = 8, classes: int = 0) -> list[dict[str, Tensor]]:
    """Return examples with different numbers of labels, so that a mean over micro batches is not a mean over labels."""
    g = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        ids = torch.randint(3, 61, (tokens,), generator=g)
        labels = ids.clone()
        labels[: (i * 2) % tokens] = -100
        made.append({"input_ids": ids, "labels": torch.tensor(i % classes) if classes else labels})
    return made


def trainer(model: nn.Module, data: list, folder, handle=None, base=None, cls=None, **settings):
    """Return a Trainer that takes plain gradient steps, without clipping, decay or shuffling."""
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1, **settings}
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, optim="sgd", learning_rate=RATE, lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=arguments.pop("report_to", []), disable_tqdm=True, save_strategy=arguments.pop("save_strategy", "no"),
        dataloader_pin_memory=False,
        logging_steps=1, train_sampling_strategy="sequential", **arguments,
    )  # fmt: skip
    own = (
        {}
        if handle is None
        else {"callbacks": [handle.callback()], "compute_loss_func": handle.compute_loss_func(base)}
    )
    return (cls or transformers.Trainer)(model=model, args=args, train_dataset=data, **own)


def step_taken(before: nn.Module, after: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of plain steps that were taken."""
    old = dict(before.named_parameters())
    return {n: (old[n] - p).detach() / RATE for n, p in after.named_parameters()}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether two sets of gradients agree."""
    return all((a[n] - b[n]).abs().max() < 1e-5 for n in b)


def test_accumulated_gradients_are_those_of_the_mean_of_the_penalties(tmp_path):
    plain = FAMILIES["Llama"].build().train()
    model, data = copy.deepcopy(plain), rows(2)
    handle = headwise.regularize(model, EntropyPenalty(strength=3.0))
    trainer(model, data, tmp_path, handle).train()

    twin = copy.deepcopy(plain)
    judge = headwise.regularize(twin, EntropyPenalty(strength=3.0))
    items = sum(int((row["labels"][1:] != -100).sum()) for row in data)
    task, penalties = [], []
    for row in data:
        logits = twin(input_ids=row["input_ids"][None]).logits[0, :-1]
        task.append(nn.functional.cross_entropy(logits, row["labels"][1:], ignore_index=-100, reduction="sum") / items)
        penalties.append(judge.loss())
    assert abs(penalties[0] - penalties[1]) > 1e-4
    assert close(step_taken(plain, model), gradients(twin, sum(task) + sum(penalties) / 2))


def test_a_last_step_with_fewer_micro_batches_divides_by_their_number(tmp_path):
    plain = FAMILIES["Llama"].build().train()
    grads = {}
    for steps in (1, 2):
        model = copy.deepcopy(plain)
        handle = headwise.regularize(model, EntropyPenalty(strength=3.0))
        # One epoch of one micro batch: the only step has one, whatever was requested.
        trainer(
            model, rows(1), tmp_path, handle, gradient_accumulation_steps=steps, max_steps=-1, num_train_epochs=1
        ).train()
        grads[steps] = step_taken(plain, model)
    assert close(grads[1], grads[2])


def test_penalties_on_weights_count_once_a_step(tmp_path):
    plain = FAMILIES["BERT"].build().train()
    head = nn.Linear(32, 2)
    model = Classifier(copy.deepcopy(plain), copy.deepcopy(head))
    bare = copy.deepcopy(model)
    handle = headwise.regularize(model, ProductDecay(strength=1.0))
    trainer(
        model, rows(2, classes=2), tmp_path, handle, base=lambda o, y, num_items_in_batch=None: 0.0 * o["logits"].sum()
    ).train()

    judge = headwise.regularize(bare, ProductDecay(strength=1.0))
    bare(input_ids=rows(1)[0]["input_ids"][None])
    assert close(step_taken(bare, model), gradients(bare, judge.loss()))


class Classifier(nn.Module):
    """A model that is not a transformers model and returns no loss."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(input_ids=input_ids).last_hidden_state[:, 0])}


def test_encoder_decoder_labels_are_not_shifted():
    family = FAMILIES["T5"]
    model, batch = family.build().train(), family.batch()
    labels = batch["decoder_input_ids"].clone()
    handle = headwise.regularize(model, DropHead(p=0.0))
    expected = model(**batch, labels=labels).loss
    assert torch.allclose(compute_loss_func(handle)(model(**batch), labels), expected)


def test_a_trainer_that_divides_by_itself_is_left_to_it(tmp_path):
    class Dividing(transformers.Trainer):
        loss_is_scaled_for_ga = False

    def mean_loss(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].float().square().mean()

    plain = FAMILIES["Llama"].build().train()
    grads = []
    for cls, base in ((Dividing, mean_loss), (None, lambda *a, **k: mean_loss(*a, **k) / 2)):
        model = copy.deepcopy(plain)
        trainer(model, rows(2), tmp_path, headwise.regularize(model, EntropyPenalty(strength=3.0)), base, cls).train()
        grads.append(step_taken(plain, model))
    assert close(*grads)


def test_evaluation_gets_the_tasks_loss_alone(tmp_path):
    model, data = FAMILIES["Llama"].build(), rows(2)
    expected = trainer(model, data, tmp_path, per_device_eval_batch_size=2).evaluate(data)["eval_loss"]
    handle = headwise.regularize(model, EntropyPenalty(strength=3.0))
    fitted = trainer(model, data, tmp_path, handle, per_device_eval_batch_size=2)
    model.train()(input_ids=data[0]["input_ids"][None])
    assert fitted.evaluate(data)["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert float(handle.loss().detach()) != 0


def test_the_callback_takes_each_optimizer_step_and_no_micro_batch(tmp_path):
    model = FAMILIES["Llama"].build()
    handle = headwise.regularize(model, EntropyPenalty())
    trainer(model, rows(6), tmp_path, handle, max_steps=3).train()
    assert handle.step == 3


@pytest.mark.bits
def test_a_resumed_run_goes_on_with_the_same_draws(tmp_path):
    def run(folder, steps, **settings):
        model = FAMILIES["Llama"].build().train()
        handle = headwise.regularize(model, DropHead(p=0.5), seed=3)
        made = trainer(model, rows(8), folder, handle, max_steps=steps, save_strategy="steps", save_steps=2, **settings)
        return model, handle, made

    whole, _, made = run(tmp_path / "whole", 4)
    made.train()
    _, _, made = run(tmp_path / "parts", 2)
    made.train()
    kept = json.loads((tmp_path / "parts" / "checkpoint-2" / "trainer_state.json").read_text())
    assert kept["stateful_callbacks"]["HeadwiseCallback"]["attributes"]["progress"]["step"] == 2
    resumed, handle, made = run(tmp_path / "parts", 4)
    made.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert handle.step == 4
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_loss_that_cannot_be_told_is_asked_for():
    model = FAMILIES["BERT"].build().train()
    handle = headwise.regularize(model, DropHead())
    outputs = model(**FAMILIES["BERT"].batch())
    with pytest.raises(
        ValueError, match=r"the loss of BertModel \(loss_type None\) cannot be computed .*pass the task's loss"
    ):
        compute_loss_func(handle)({"logits": outputs.last_hidden_state}, torch.zeros(3))
    with pytest.raises(ValueError, match="BertModel returned no loss and its batch has no labels"):
        compute_loss_func(handle)({"logits": outputs.last_hidden_state}, None)
    with pytest.raises(ValueError, match="BertModel adds a loss of its experts"):
        compute_loss_func(handle)({"logits": outputs.last_hidden_state, "aux_loss": torch.ones(())}, torch.zeros(3))


def test_outside_a_trainer_the_penalty_is_added_once():
    model = FAMILIES["Llama"].build().train()
    handle = headwise.regularize(model, EntropyPenalty(strength=3.0))
    loss = compute_loss_func(handle, base=lambda outputs, labels, num_items_in_batch=None: torch.zeros(()))
    batch = FAMILIES["Llama"].batch()
    model(**batch)
    penalty = float(handle.loss().detach())
    assert float(loss(model(**batch), None).detach()) == pytest.approx(penalty)


@pytest.mark.parametrize("method", [DropHead(p=0.5), EntropyPenalty()], ids=repr)
def test_reentrant_checkpointing_under_trainer_is_refused_with_its_remedy(method, tmp_path):
    model = FAMILIES["Llama"].build()
    handle = headwise.regularize(model, method)
    new = "activation_checkpointing" in {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    settings = {name: True, f"{name}_kwargs": {"use_reentrant": True}}
    with pytest.raises(
        RuntimeError, match=rf"{type(method).__name__}.*\{{'use_reentrant': False\}} as activation_checkpointing_kwargs"
    ):
        trainer(model, rows(2), tmp_path, handle, **settings).train()


def test_penalties_that_trainer_never_adds_are_told(tmp_path):
    model = FAMILIES["Llama"].build()
    handle = headwise.regularize(model, EntropyPenalty())
    made = trainer(model, rows(8), tmp_path, max_steps=4)
    made.add_callback(handle.callback())
    with pytest.raises(
        RuntimeError, match=r"loss\(\) was never read.*compute_loss_func=regularized\.compute_loss_func"
    ):
        made.train()


@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_model_comes_back_with_the_strengths_of_its_step(only_model, tmp_path):
    model, data = FAMILIES["Llama"].build(), rows(8)
    handle = headwise.regularize(model, NeuTRENO(warmup_steps=8), DropHead(p=0.1))
    every = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_only_model": only_model,
    }
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    cls = partial(transformers.Trainer, eval_dataset=data[:2])
    made = trainer(model, data, tmp_path, handle, cls=cls, max_steps=6, **best, **every)
    evaluate = made.evaluate
    seen = {}

    def worse(*args, **kwargs):
        found = evaluate(*args, **kwargs)
        seen[made.state.global_step] = found["eval_loss"]
        return {**found, "eval_loss": float(made.state.global_step)}

    made.evaluate = worse
    made.train()
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    assert handle.step == 2
    assert float(handle.fitted[1].states[0].value("strength")) == pytest.approx(0.6 * 2 / 8)
    assert evaluate()["eval_loss"] == pytest.approx(seen[2], abs=1e-6)
    assert seen[2] != pytest.approx(seen[6], abs=1e-6)
