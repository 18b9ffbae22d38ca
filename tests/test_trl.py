"""TRL's trainers: methods, penalties and watching by one callback, on packed and padded rows."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "hosts"))

import backend_functions
from backend_functions import use
from transformers import LlamaConfig, LlamaForCausalLM

import headwise
from headwise import DropHead, EntropyPenalty, HeadwiseCallback, QKClip, SigmaReparam

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
datasets = pytest.importorskip("datasets")

# Deprecations of libraries are not tested here.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
LENGTHS = (5, 9, 3, 7)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    backend_functions.put_in_place(monkeypatch)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(58))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model(kind="flash_attention_2"):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        pad_token_id=0,
        eos_token_id=1,
    )
    return use(LlamaForCausalLM(config), kind)


def rows(count=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 60, (LENGTHS[n % 4],), generator=generator).tolist() for n in range(count)]


def arguments(kind, folder, **more):
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e6,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        seed=1,
        data_seed=1,
        **more,
    )


def fine_tune(tmp_path, tokenizer, methods, kind="flash_attention_2", **more):
    callback = HeadwiseCallback(*methods, watch={"every": 1, "on_alert": None})
    settings = arguments(trl.SFTConfig, tmp_path, max_length=None if "packing" not in more else 16, **more)
    data = datasets.Dataset.from_list([{"input_ids": ids} for ids in rows()])
    trainer = trl.SFTTrainer(
        model(kind), settings, train_dataset=data, processing_class=tokenizer, callbacks=[callback]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    read = {(r["site"], r["head"], r["statistic"], r["step"]): r["value"] for r in callback.watch.records()}
    weights = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    return losses, read, weights, callback.regularized


def test_a_padding_free_sft_run_is_the_padded_run(tmp_path, tokenizer):
    methods = [DropHead(p=0.5), EntropyPenalty(strength=1.0)]
    padded = fine_tune(tmp_path / "padded", tokenizer, methods, gradient_accumulation_steps=2)
    free = fine_tune(tmp_path / "free", tokenizer, methods, gradient_accumulation_steps=2, padding_free=True)
    plain = fine_tune(tmp_path / "sdpa", tokenizer, methods, kind="sdpa", gradient_accumulation_steps=2)
    # Each row ends with padding that no mask marks.
    filled = {"gradient_accumulation_steps": 2, "padding_free": True, "pad_to_multiple_of": 16}
    behind = fine_tune(tmp_path / "behind", tokenizer, methods, **filled)
    for other in (free, plain, behind):
        torch.testing.assert_close(other[0], padded[0], rtol=1e-4, atol=1e-4)
        assert other[1].keys() == padded[1].keys()
        torch.testing.assert_close(
            list(other[1].values()), list(padded[1].values()), rtol=1e-4, atol=1e-4, equal_nan=True
        )
        torch.testing.assert_close(other[2], padded[2], rtol=1e-4, atol=1e-5)
    assert free[3].fitted[0].kernels == {"the host's"}


def test_a_packed_sft_run_sees_every_sequence_apart(tmp_path, tokenizer):
    seen = []
    whole = headwise.attend.attention.fitted_layer.FittedLayer.attention

    def look(self, q, k, v, original, *, packed=None, **settings):
        seen.append(None if packed is None else packed.lengths.tolist())
        return whole(self, q, k, v, original, packed=packed, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headwise.attend.attention.fitted_layer.FittedLayer, "attention", look)
        losses, *_ = fine_tune(tmp_path, tokenizer, [DropHead(p=0.5)], packing=True)
    assert len(losses) == 2
    assert {n for lengths in seen if lengths for n in lengths} <= set(LENGTHS)
    assert any(lengths and len(lengths) > 1 for lengths in seen)


def test_the_pages_code_trains(tmp_path, tokenizer, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "backends.md").read_text(encoding="utf-8")
    code = re.search(r"```\n(from trl import.*?)```", page, re.DOTALL)[1]
    model("sdpa").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    # An existing model, and an installed kernel.
    replacements = {
        "Qwen/Qwen3-0.6B": str(tmp_path / "model"),
        "flash_attention_2": "sdpa",
        "packing=True": "packing=True, use_cpu=True, bf16=False, max_steps=2, max_length=16, report_to=[]",
    }
    for old, new in replacements.items():
        assert old in code
        code = code.replace(old, new)
    monkeypatch.chdir(tmp_path)
    left = {"dataset": datasets.Dataset.from_list([{"text": "w1 w2 w3 w4"}, {"text": "w5 w6"}] * 16)}
    exec(code, left)
    assert left["methods"].regularized.step == 2 and left["methods"].watch.records()


def test_the_penalty_is_added_once_to_the_loss_of_dpo(tmp_path, tokenizer):
    pairs = [
        {"prompt": "w1 w2", "chosen": "w3 w4 w5", "rejected": "w6"},
        {"prompt": "w7", "chosen": "w8", "rejected": "w9 w3"},
    ] * 2
    found = {}
    for strength in (0.0, 1.0):
        callback = HeadwiseCallback(EntropyPenalty(strength=strength))
        trainer = trl.DPOTrainer(
            model(),
            ref_model=model(),
            args=arguments(trl.DPOConfig, tmp_path, max_length=None),
            train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        found[strength] = trainer.compute_loss(trainer.model, batch)
        assert not callback.regularized.drop_penalties()
        trainer.model.eval()
        found["plain"] = trainer.compute_loss(trainer.model, batch)
    twin = headwise.regularize(model().train(), EntropyPenalty(strength=1.0))
    both = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    twin.model(**both, use_cache=False)
    torch.testing.assert_close(found[0.0].detach(), found["plain"].detach())
    torch.testing.assert_close((found[1.0] - found[0.0]).detach(), twin.loss().detach())
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_reference_that_runs_through_the_methods_is_refused(tmp_path, tokenizer):
    from peft import LoraConfig

    trainer = trl.DPOTrainer(
        model(),
        args=arguments(trl.DPOConfig, tmp_path, max_length=None),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1 w2", "chosen": "w3", "rejected": "w6"}] * 2),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["q_proj"]),
        callbacks=[HeadwiseCallback(DropHead(p=0.5))],
    )
    with pytest.raises(ValueError, match=r"DPOTrainer uses the regularized model itself.*DropHead.*ref_model"):
        trainer.train()


def test_grpo_is_refused_by_name_for_methods_that_change_the_model(tmp_path, tokenizer):
    settings = arguments(trl.GRPOConfig, tmp_path, num_generations=2, max_completion_length=4)
    given = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions], "args": settings}
    data = datasets.Dataset.from_list([{"prompt": "w1 w2"}] * 4)
    own = model("sdpa")
    with pytest.raises(ValueError, match=r"GRPOTrainer samples from the model.*DropHead\(p=0.5\)"):
        trl.GRPOTrainer(
            own, train_dataset=data, processing_class=tokenizer, callbacks=[HeadwiseCallback(DropHead(p=0.5))], **given
        )
    with pytest.raises(ValueError, match="not regularized"):
        headwise.handle(own)
    with pytest.raises(ValueError, match=r"GRPOTrainer samples from the model.*SigmaReparam"):
        trl.GRPOTrainer(
            own, train_dataset=data, processing_class=tokenizer, callbacks=[HeadwiseCallback(SigmaReparam())], **given
        )
    # Penalties and methods that act after a step are accepted.
    callback = HeadwiseCallback(EntropyPenalty(strength=0.1), QKClip(threshold=1e-6))
    trainer = trl.GRPOTrainer(own, train_dataset=data, processing_class=tokenizer, callbacks=[callback], **given)
    before = copy.deepcopy(own.model.layers[0].self_attn.q_proj.weight)
    trainer.train()
    assert callback.regularized.step == 2
    assert own.model.layers[0].self_attn.q_proj.weight.abs().max() < before.abs().max() / 2


def test_a_loss_of_ones_own_is_refused_beside_a_trainer_that_computes_it(tmp_path, tokenizer):
    data = datasets.Dataset.from_list([{"input_ids": ids} for ids in rows()])
    with pytest.raises(ValueError, match=r"SFTTrainer computes its own loss: leave base= out"):
        trl.SFTTrainer(
            model("sdpa"),
            arguments(trl.SFTConfig, tmp_path),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[HeadwiseCallback(DropHead(), base=lambda *_, **__: None)],
        )
