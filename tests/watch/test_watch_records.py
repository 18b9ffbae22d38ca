import math

import pytest
import torch
from small_models import HOSTS, fresh
from watch.watched_model import read, watched

import headwise
from headwise.health.watching.logs import JsonLines


def test_records_are_dicts_of_site_head_step_statistic_and_value():
    model, watch = watched(every=2)
    for _ in range(3):
        read(model, watch)
    assert {r["step"] for r in watch.records()} == {0, 2}
    first = watch.records()[0]
    assert first == {
        "site": "blocks.0.attn", "depth": 0, "head": 0, "step": 0, "statistic": "entropy_share",
        "value": first["value"],
    }  # fmt: skip
    assert isinstance(first["value"], float)
    assert {r["head"] for r in watch.records() if r["statistic"] == "token_cosine"} == {None}


def test_a_head_of_which_nothing_was_counted_has_no_record():
    from types import SimpleNamespace

    from headwise.health.statistics import Tally
    from headwise.health.watching.figures import Figures

    site = SimpleNamespace(name="a", depth=0)
    tally = Tally(torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([2.0, 0.0, 2.0]))
    found = list(Figures.of(site, 0, "entropy_share", tally).records())
    assert [r["head"] for r in found] == [0, 2]
    assert math.isnan(found[1]["value"])
    largest = Tally.extremum(torch.tensor([1.0, -torch.inf, torch.nan]), "max", False)
    assert [r["head"] for r in Figures.of(site, 0, "max_logit", largest).records()] == [0, 2]


def test_the_trainer_callback_reads_optimizer_steps(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = fresh(HOSTS["llama"])
    data = [{"input_ids": torch.arange(9) + i, "labels": torch.arange(9) + i} for i in range(16)]
    callback = headwise.WatchCallback(
        every=2, on_alert=None, log=JsonLines(tmp_path / "a.jsonl"), statistics=["attention_entropy"]
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
    assert {r["step"] for r in callback.watch.records()} == {0, 2}
    assert callback.watch.removed
    assert (tmp_path / "a.jsonl").exists()
    assert len(callback.watch.records()) == 2 * 4 * model.config.num_hidden_layers


def test_a_training_that_an_exception_ended_can_be_started_again(tmp_path):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Failing(TrainerCallback):
        fails = True

        def on_step_end(self, args, state, control, **others):
            if self.fails:
                raise RuntimeError("of the user")

    model, failing = fresh(HOSTS["llama"]), Failing()
    data = [{"input_ids": torch.arange(9) + i, "labels": torch.arange(9) + i} for i in range(4)]
    callback = headwise.WatchCallback(every=1, on_alert=None, statistics=["attention_entropy"])
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback, failing])
    with pytest.raises(RuntimeError, match="of the user"):
        trainer.train()
    failing.fails = False
    trainer.train()
    assert callback.watch.removed
    assert {r["step"] for r in callback.watch.records()} == {0, 1}
