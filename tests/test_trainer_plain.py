"""A neutral method under transformers.Trainer trains to the plain Trainer's numbers, with any model and
settings."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from grids import part_of_grid
from processes import in_two_processes
from tiny_models import FAMILIES, SEQ2SEQ, TEXT, randomize
from torch import Tensor, nn

import headwise
from headwise import DropHead, EntropyPenalty

COUNT, TOKENS = 10, 8
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
PAIR = {k: 0.0 if v == "dropout" else v for k, v in SEQ2SEQ.items()} | {"max_position_embeddings": 64}
BERT = {**TEXT, **SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}
T5 = {
    "vocab_size": 61, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48, "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip


class Own(nn.Module):
    """A custom model that takes labels and no further keywords, so that Trainer passes it no number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.body = FAMILIES["BERT"].build()
        self.head = nn.Linear(32, 61)
        self.config = self.body.config

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(input_ids=input_ids).last_hidden_state)
        made = {"logits": logits}
        if labels is not None:
            made["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return made


def made(name: str, **settings) -> nn.Module:
    """Return a small transformers model by the name of its class."""
    config = getattr(
        transformers, name.partition("For")[0].partition("MTModel")[0].removesuffix("LMHeadModel") + "Config"
    )
    return getattr(transformers, name)(config(**settings))


# name: the model, and which labels its examples have
KINDS = {
    "Llama": (lambda: FAMILIES["Llama"].build(), "tokens"),
    "GPT2LMHeadModel": (lambda: FAMILIES["GPT2"].build(), "tokens"),
    "BertForMaskedLM": (lambda: made("BertForMaskedLM", **BERT), "tokens"),
    "BertForTokenClassification": (lambda: made("BertForTokenClassification", num_labels=61, **BERT), "tokens"),
    "BertForSequenceClassification": (lambda: made("BertForSequenceClassification", num_labels=3, **BERT), "class"),
    "BertForSequenceClassification-regression": (
        lambda: made("BertForSequenceClassification", num_labels=1, **BERT), "number",
    ),
    "MixtralForCausalLM": (
        lambda: made(
            "MixtralForCausalLM", **TEXT, **SMALL, num_key_value_heads=2, num_local_experts=2,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        ),
        "tokens",
    ),
    "Own": (Own, "tokens"),
    "BartForConditionalGeneration": (lambda: made("BartForConditionalGeneration", **TEXT, **PAIR), "pairs"),
    "MarianMTModel": (lambda: made("MarianMTModel", **TEXT, **PAIR), "pairs"),
    "PegasusForConditionalGeneration": (lambda: made("PegasusForConditionalGeneration", **TEXT, **PAIR), "pairs"),
    "M2M100ForConditionalGeneration": (lambda: made("M2M100ForConditionalGeneration", **TEXT, **PAIR), "pairs"),
    "T5ForConditionalGeneration": (lambda: made("T5ForConditionalGeneration", **T5), "pairs"),
    "MT5ForConditionalGeneration": (lambda: made("MT5ForConditionalGeneration", **T5), "pairs"),
    "WhisperForConditionalGeneration": (
        lambda: made(
            "WhisperForConditionalGeneration", **TEXT, **{k: v for k,
            v in PAIR.items() if k != "max_position_embeddings"},
            num_mel_bins=8, max_source_positions=12, max_target_positions=16,
        ),
        "speech",
    ),
}  # fmt: skip
PAIRS = [name for name, (_, labels) in KINDS.items() if labels in ("pairs", "speech")]


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = KINDS[kind][0]()
    randomize(model, 0)
    return model.train()


def rows(kind: str, decoder: bool = False) -> list[dict[str, Tensor]]:
    """Return examples with different numbers of labels, so that a mean over micro batches is not a mean over labels."""
    g, found = torch.Generator().manual_seed(0), []
    for i in range(COUNT):
        ids = torch.randint(3, 61, (TOKENS,), generator=g)
        labels = torch.randint(3, 61, (TOKENS,), generator=g) if KINDS[kind][1] in ("pairs", "speech") else ids.clone()
        labels[: (i * 2) % TOKENS] = -100
        row = {"input_ids": ids, "labels": labels}
        if KINDS[kind][1] == "class":
            row["labels"] = torch.tensor(i % 3)
        if KINDS[kind][1] == "number":
            row["labels"] = torch.tensor(i % 3 + 0.5)
        if KINDS[kind][1] == "speech":
            row["input_features"] = torch.randn(8, 24, generator=g)
            del row["input_ids"]
        if decoder:
            row["decoder_input_ids"] = torch.cat([torch.tensor([1]), labels[:-1].clamp(min=3)])
        found.append(row)
    return found


def trained(kind: str, folder, method=None, decoder: bool = False, cls=None, **settings):
    """Train by plain gradient steps; return the losses of the log, the evaluation's loss and the parameters."""
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3, **settings}
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[], disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, logging_steps=1,
        train_sampling_strategy="sequential", per_device_eval_batch_size=4, **arguments,
    )  # fmt: skip
    model, own = build(kind), {}
    if method is not None:
        handle = headwise.regularize(model, method)
        own = {"callbacks": [handle.callback()], "compute_loss_func": handle.compute_loss_func()}
    data = rows(kind, decoder)
    trainer = (cls or transformers.Trainer)(model=model, args=args, train_dataset=data, eval_dataset=data[:3], **own)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_same(ours, plain):
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert len(ours[0]) > 1
    assert ours[1] == pytest.approx(plain[1], rel=1e-4)
    for name, value in plain[2].items():
        torch.testing.assert_close(ours[2][name], value, rtol=1e-4, atol=1e-5, msg=name)


SETTINGS = {
    "one micro batch": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 3},
    "accumulated": {"gradient_accumulation_steps": 2},
    "a short last step": {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 1},
    "tokens of each device": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
}


SHORT = "a short last step"
CASES = [(kind, SHORT) for kind in KINDS]
CASES += [(kind, one) for kind in ("Llama", "Own", "BartForConditionalGeneration") for one in SETTINGS if one != SHORT]


# tokens, pairs and a custom model, each with its own settings
KEPT = [("Llama", SHORT), ("BartForConditionalGeneration", "accumulated"), ("Own", "one micro batch")]


@pytest.mark.parametrize(("kind", "settings"), part_of_grid(CASES, KEPT))
def test_a_neutral_method_trains_to_the_plain_trainers_numbers(kind, settings, tmp_path):
    chosen = SETTINGS[settings]
    ours = trained(kind, tmp_path, DropHead(p=0.0), **chosen)
    assert_same(ours, trained(kind, tmp_path, **chosen))


@pytest.mark.parametrize(
    "kind",
    part_of_grid(
        [
            "Llama",
            "BertForSequenceClassification",
            "Own",
            "BartForConditionalGeneration",
            "WhisperForConditionalGeneration",
        ],
        ["Llama"],
    ),
)
def test_label_smoothing_is_the_plain_trainers(kind, tmp_path):
    options = {"label_smoothing_factor": 0.3, "decoder": kind in PAIRS}
    ours, plain = (trained(kind, tmp_path, method, **options) for method in (DropHead(p=0.0), None))
    assert_same(ours, plain)
    assert plain[0] != pytest.approx(trained(kind, tmp_path, decoder=kind in PAIRS)[0], rel=1e-3)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", part_of_grid(["Llama", "Own", "T5ForConditionalGeneration"], ["Own"]))
def test_a_trainer_that_says_how_its_loss_is_scaled_is_followed(kind, scaled, tmp_path):
    cls = type("Saying", (transformers.Trainer,), {"loss_is_scaled_for_ga": scaled})
    assert_same(trained(kind, tmp_path, DropHead(p=0.0), cls=cls), trained(kind, tmp_path, cls=cls))


def test_a_penalty_of_strength_0_changes_nothing_and_a_strong_one_does(tmp_path):
    kind = "BartForConditionalGeneration"
    plain = trained(kind, tmp_path)
    assert_same(trained(kind, tmp_path, EntropyPenalty(strength=0.0)), plain)
    assert trained(kind, tmp_path, EntropyPenalty(strength=3.0))[0] != pytest.approx(plain[0], rel=1e-3)


def test_smoothing_beside_a_loss_of_ones_own_is_refused(tmp_path):
    model = build("Llama")
    handle = headwise.regularize(model, DropHead(p=0.0))
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=0.1, max_steps=1
    )
    own = handle.compute_loss_func(base=lambda outputs, labels, num_items_in_batch=None: outputs["logits"].sum())
    with pytest.raises(
        ValueError, match=r"label_smoothing_factor=0.1 has no effect with compute_loss_func\(base=...\)"
    ):
        transformers.Trainer(model=model, args=args, train_dataset=rows("Llama"), compute_loss_func=own).train()


def test_a_model_around_a_sequence_to_sequence_model_is_told_that_it_gets_no_labels(tmp_path):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("BartForConditionalGeneration")
            self.config = self.inner.config

        def forward(self, input_ids, labels=None, **kwargs):
            return self.inner(input_ids=input_ids, labels=labels, **kwargs)

    model = Around()
    handle = headwise.regularize(model.inner, DropHead(p=0.0))
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    data = rows("BartForConditionalGeneration")
    made = transformers.Trainer(
        model=model, args=args, train_dataset=data, compute_loss_func=handle.compute_loss_func()
    )
    with pytest.raises(ValueError, match=r"without labels and without decoder_input_ids .*DataCollatorForSeq2Seq"):
        made.train()


def test_labels_are_given_by_one_hook_which_leaves_with_the_handle():
    model = build("BartForConditionalGeneration")
    before = len(model._forward_pre_hooks)
    handle = headwise.regularize(model, DropHead(p=0.0))
    added = len(model._forward_pre_hooks)
    handle.compute_loss_func()
    handle.compute_loss_func()
    assert len(model._forward_pre_hooks) == added + 1
    copy.deepcopy(model)
    handle.remove()
    assert len(model._forward_pre_hooks) == before


# Two processes

JOBS = [
    ("Llama", {"average_tokens_across_devices": True}),
    ("Llama", {"average_tokens_across_devices": False}),
    ("Llama", {"label_smoothing_factor": 0.3}),
    ("BertForSequenceClassification-regression", {}),
    ("Own", {}),
    ("T5ForConditionalGeneration", {}),
]


def _process(rank, port, folder):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
    }  # fmt: skip
    torch.set_num_threads(1)
    # The test reads the log, which is not shown to the reader.
    sys.stdout = (folder / f"{rank}.out").open("w")
    found = []
    for kind, settings in JOBS:
        arguments = {"ddp_backend": "gloo", "ddp_find_unused_parameters": True, "max_steps": 2, **settings}
        found.append([trained(kind, folder, method, **arguments) for method in (DropHead(p=0.0), None)])
    if rank == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = Path(tmp_path_factory.mktemp("processes"))
    in_two_processes(_process, folder)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.grid
@pytest.mark.parametrize("index", range(len(JOBS)), ids=[f"{k}-{'-'.join(map(str, s.values()))}" for k, s in JOBS])
def test_two_processes_train_to_the_plain_trainers_numbers(pairs, index):
    assert_same(*pairs[index])
