"""What methods learned on a model with adapters is saved and loaded with the adapters, also by a Trainer."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file
from test_trainer import rows
from tiny_models import FAMILIES

import headwise
from headwise import AttnScale, DropHead, GatedOutput, QKNorm

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LEARNING = [GatedOutput(), AttnScale(), QKNorm()]


def adapted(**settings):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(FAMILIES["Llama"].build(), config)


def trained(folder, method, resume=None, model=None, **settings):
    """Train with one method for four steps, with a checkpoint after each two; return callback and Trainer."""
    callback = headwise.HeadwiseCallback(method)
    options = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "logging_steps": 1, "learning_rate": 0.05}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), save_strategy="steps", report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        per_device_train_batch_size=2, **{**options, **settings},
    )  # fmt: skip
    made = transformers.Trainer(
        model or adapted(), arguments, train_dataset=rows(8), eval_dataset=rows(8), callbacks=[callback]
    )
    made.train(resume_from_checkpoint=resume)
    return callback, made


def learned(model):
    return {k: t.clone() for k, t in model.state_dict().items() if ".headwise." in k and t.is_floating_point()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[k], theirs[k], atol=1e-6) for k in ours)


@pytest.mark.parametrize("method", LEARNING, ids=repr)
def test_a_resumed_run_ends_where_one_that_was_not_interrupted_ends(method, tmp_path):
    callback, whole = trained(tmp_path / "whole", method)
    kept = tmp_path / "whole" / "checkpoint-2"
    assert set(callback.regularized.brought) <= set(load_file(kept / "headwise.safetensors"))
    _, resumed = trained(tmp_path / "resumed", method, resume=str(kept))
    assert same(learned(whole.model), learned(resumed.model))
    assert not same(learned(whole.model), load_file(kept / "headwise.safetensors"))


def test_the_best_checkpoint_brings_what_methods_learned_by_then(tmp_path):
    # the loss falls, so that the earlier checkpoint is the one with the greater loss
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    callback, made = trained(tmp_path, GatedOutput(), eval_strategy="steps", **best)
    kept = load_file(tmp_path / "checkpoint-2" / "headwise.safetensors")
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    assert same(learned(made.model), {k: t for k, t in kept.items() if t.is_floating_point()})
    assert callback.regularized.step == 2


def test_a_saved_adapter_is_loaded_with_the_methods_and_what_they_learned(tmp_path):
    model = adapted()
    handle = headwise.regularize(model, GatedOutput(), DropHead(p=0.2), seed=5)
    with torch.no_grad():
        for name in handle.brought:
            model.get_parameter(name).add_(0.3)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(FAMILIES["Llama"].build(), tmp_path)
    back = headwise.load_pretrained(again, tmp_path)
    assert back.methods == handle.methods and back.shared.seed == 5
    assert same(learned(model), learned(again))


def test_an_adapter_loaded_later_brings_them_too_and_one_without_them_is_told(tmp_path):
    model = adapted()
    handle = headwise.regularize(model, GatedOutput())
    with torch.no_grad():
        model.get_parameter(handle.brought[0]).add_(0.3)
    model.save_pretrained(tmp_path / "full")
    before = learned(model)
    adapted().save_pretrained(tmp_path / "plain")
    with torch.no_grad():
        model.get_parameter(handle.brought[0]).add_(0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.load_adapter(tmp_path / "full", "default")
    assert same(learned(model), before)
    with pytest.warns(UserWarning, match=r"plain holds no headwise\.safetensors: .*GatedOutput.* stays as it is"):
        model.load_adapter(tmp_path / "plain", "default")
    with pytest.warns(UserWarning, match="'other' is not the active adapter: .* stays as it is"):
        model.load_adapter(tmp_path / "full", "other")


def test_what_other_methods_learned_is_refused(tmp_path):
    model = adapted()
    headwise.regularize(model, GatedOutput())
    model.save_pretrained(tmp_path)
    other = adapted()
    headwise.regularize(other, AttnScale())
    before = learned(other)
    with pytest.raises(ValueError, match="does not fit these methods on these layers"):
        other.load_adapter(tmp_path, "default")
    assert same(learned(other), before)


def test_modules_that_peft_saves_whole_and_a_second_adapter_come_back(tmp_path):
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("default")
    handle = headwise.regularize(model, GatedOutput())
    with torch.no_grad():
        model.get_parameter(handle.brought[0]).add_(0.3)
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(0.1)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "headwise.safetensors").is_file() and (tmp_path / "second" / "headwise.safetensors").is_file()
    again = peft.PeftModel.from_pretrained(FAMILIES["Llama"].build(), tmp_path)
    headwise.load_pretrained(again, tmp_path)
    ids = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_copy_saves_its_own_values_and_removal_gives_peft_back(tmp_path):
    model = adapted()
    handle = headwise.regularize(model, GatedOutput())
    twin = copy.deepcopy(model)
    name = handle.brought[0]
    with torch.no_grad():
        twin.get_parameter(name).add_(0.3)
    twin.save_pretrained(tmp_path / "twin")
    assert torch.equal(load_file(tmp_path / "twin" / "headwise.safetensors")[name], twin.get_parameter(name))
    merged = copy.deepcopy(model).merge_and_unload()
    assert merged.state_dict().keys() >= {name.removeprefix("base_model.model.")}
    handle.remove()
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "headwise.safetensors").exists()
    assert "save_pretrained" not in model.__dict__ and "load_adapter" not in model.__dict__
