"""LlamaFactory and ms-swift: the code of the page, run by stand-ins that have their interfaces.

The stand-ins have what was read in llamafactory 0.9.5 and ms_swift 4.6.0: who makes the callbacks and when, when
`compute_loss_func` is set, and with which arguments it is called.
"""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torchvision_stub  # noqa: F401  (before transformers)
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

import headwise
from headwise import EntropyPenalty, HeadwiseCallback

PAGE = (Path(__file__).parents[1] / "docs" / "at_home.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
PENALTY = EntropyPenalty(strength=0.5)
ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(1, 32, (16, 8), generator=torch.Generator().manual_seed(0))
]


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def arguments(folder, **changes):
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "report_to": []}
    return Seq2SeqTrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **(settings | changes))


def log_softmax_loss(outputs, labels, num_items_in_batch=None, **more):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class LogCallback(TrainerCallback):
    """A callback of the framework itself."""


class CustomSeq2SeqTrainer(Seq2SeqTrainer):
    """LlamaFactory's trainer of `sft`: it may set `compute_loss_func` after the callbacks have seen the model."""

    __module__ = "llamafactory.train.sft.trainer"

    def __init__(self, own_loss=False, **options):
        super().__init__(**options)
        if own_loss:
            self.compute_loss_func = log_softmax_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


class SwiftTrainer(Seq2SeqTrainer):
    """ms-swift's trainer of `sft`: it makes the callbacks itself, and calls its loss with more arguments."""

    __module__ = "swift.trainers.seq2seq_trainer"

    def __init__(self, model, args, names, callbacks_map, own_loss=False, **options):
        callbacks = [callbacks_map[name](args, self) for name in names]
        if own_loss:
            options["compute_loss_func"] = log_softmax_loss
        super().__init__(model=model, args=args, callbacks=callbacks, **options)

    def _prepare_inputs(self, inputs):
        return {**super()._prepare_inputs(inputs), "compute_loss_func": self.compute_loss_func}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss_of = inputs.pop("compute_loss_func", None)
        if loss_of is None:
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = loss_of(outputs, labels, num_items_in_batch=num_items_in_batch, loss_scale=None, trainer=self)
        return (loss, outputs) if return_outputs else loss


def code(begins):
    """Return the block of the page that begins with this line."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return next(block for block in blocks if block.startswith(begins))


@pytest.fixture
def llamafactory(monkeypatch, tmp_path):
    """Stand-ins for LlamaFactory's modules; `made` holds the trainers, and `asked` what `run_exp` was given."""
    state = types.SimpleNamespace(made=[], asked=[], read={"max_steps": 3})

    def run_exp(args=None, callbacks=None):
        state.asked.append(args)
        known = {key: value for key, value in (args or state.read).items() if key in ("seed", "max_steps")}
        callbacks = [*(callbacks or []), LogCallback()]
        rows = {"train_dataset": ROWS, "eval_dataset": ROWS}
        settings = arguments(tmp_path / "out", **known)
        trainer = CustomSeq2SeqTrainer(model=llama(), args=settings, callbacks=callbacks, **rows)
        state.made.append(trainer)
        trainer.train()
        if (args or {}).get("do_eval"):
            trainer.evaluate()

    tuner, hparams = types.ModuleType("llamafactory.train.tuner"), types.ModuleType("llamafactory.hparams")
    tuner.run_exp, hparams.read_args = run_exp, lambda: dict(state.read)
    for name, module in {"llamafactory.train.tuner": tuner, "llamafactory.hparams": hparams}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("llamafactory", "llamafactory.train"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return state


@pytest.fixture
def callbacks_map(monkeypatch):
    module, known = types.ModuleType("swift.callbacks"), {}
    module.callbacks_map = known
    monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.callbacks", module)
    return known


def run_as_script(text):
    exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})


def test_llamafactorys_page_trains_with_methods_penalties_and_watch(llamafactory):
    run_as_script(code("# train.py"))
    callback = next(one for one in llamafactory.made[0].callback_handler.callbacks if isinstance(one, HeadwiseCallback))
    assert callback.regularized.step == 3 and callback.regularized.seen_training
    assert {record["step"] for record in callback.watch.records()} == {0}


def test_llamafactorys_study_takes_seed_folder_and_arm_from_its_run(llamafactory, tmp_path):
    (tmp_path / "study.py").write_text(code("# study.py"))
    # without a study, it is the baseline with seed 0
    llamafactory.read |= {"seed": 42}
    run_as_script(code("# study.py"))
    (asked,) = llamafactory.asked
    assert asked["seed"] == headwise.run().seed == 0 and asked["do_eval"] is True and asked["max_steps"] == 3
    assert asked["output_dir"] == str(headwise.run().folder)


def test_swifts_plugin_is_found_by_its_name_and_trains(callbacks_map, tmp_path):
    exec(code("# headwise_plugin.py"), {})
    assert list(callbacks_map) == ["headwise"]
    trainer = SwiftTrainer(llama(), arguments(tmp_path), ["headwise"], callbacks_map, train_dataset=ROWS)
    trainer.train()
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, HeadwiseCallback))
    assert callback.regularized.step == 4 and callback.watch.records()


def weights(trainer):
    trainer.train()
    return dict(trainer.model.named_parameters())


def of_llamafactory(folder, *methods, own_loss=False):
    callbacks = [HeadwiseCallback(*methods)] if methods else []
    return CustomSeq2SeqTrainer(
        own_loss, model=llama(), args=arguments(folder), callbacks=callbacks, train_dataset=ROWS
    )


def of_swift(folder, *methods, own_loss=False):
    known = {"headwise": lambda args, trainer: HeadwiseCallback(*methods)}
    names = ["headwise"] if methods else []
    return SwiftTrainer(llama(), arguments(folder), names, known, own_loss, train_dataset=ROWS)


@pytest.mark.parametrize("made", [of_llamafactory, of_swift])
@pytest.mark.parametrize("own_loss", [False, True])
def test_a_penalty_acts_as_in_transformers_trainer(made, own_loss, tmp_path):
    found = weights(made(tmp_path / "a", PENALTY, own_loss=own_loss))
    without = weights(made(tmp_path / "b", own_loss=own_loss))
    options = {"compute_loss_func": log_softmax_loss} if own_loss else {}
    plain = Trainer(
        llama(), arguments(tmp_path / "c"), train_dataset=ROWS, callbacks=[HeadwiseCallback(PENALTY)], **options
    )
    expected = weights(plain)
    # Adam moves each weight by about the learning rate, whatever the size of a difference
    apart = max((one - without[name]).abs().max() for name, one in found.items())
    off = max((one - expected[name]).abs().max() for name, one in found.items())
    assert apart > 5e-5 and off < 1e-6


@pytest.mark.parametrize("made", [of_llamafactory, of_swift])
def test_an_evaluation_has_no_penalty(made, tmp_path):
    losses = [made(tmp_path, *methods).evaluate(ROWS)["eval_loss"] for methods in ((PENALTY,), ())]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
