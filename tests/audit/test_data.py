"""Audits on data: what is told of a head at its only reading, and what models of texts, images or both are given."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers as tf
from audit.spoiled_checkpoints import refused
from PIL import Image

from headwise import Thresholds
from headwise.health.auditing.audit import audit

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def data(tmp_path):
    """A text of 200 words and three pictures."""
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 30}" for i in range(200)))
    for index in range(3):
        image = Image.effect_noise((20, 24), 50 + 40 * index).convert("RGB")
        (tmp_path / "pictures").mkdir(exist_ok=True)
        image.save(tmp_path / "pictures" / f"{index}.png")
    return {"text": tmp_path / "text.txt", "images": tmp_path / "pictures"}


def saved(model, folder):
    """Save a model with a tokenizer of 40 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(39)} | {"unknown": 39}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="unknown").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def bert(positions=64):
    torch.manual_seed(0)
    return tf.BertModel(tf.BertConfig(**SIZES, vocab_size=40, max_position_embeddings=positions))


def clip():
    torch.manual_seed(0)
    text = tf.CLIPTextConfig(**SIZES, vocab_size=40, max_position_embeddings=20, eos_token_id=39)
    vision = tf.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    return tf.CLIPModel(tf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16))


def test_a_head_that_has_collapsed_is_told_of_at_its_only_reading(tmp_path, data):
    model = bert()
    with torch.no_grad():
        for part in ("query", "key"):
            getattr(model.encoder.layer[1].attention.self, part).weight[:8] *= 300
    folder = saved(model, tmp_path / "model")
    found = [a for a in audit(folder, text=data["text"]).alerts if a["alert"] == "sharp_head"]
    assert [(a["site"], a["head"]) for a in found] == [("encoder.layer.1.attention.self", 0)]
    assert "is below 5 % of its range (0.0" in found[0]["sentence"]


def test_the_limits_of_activations_can_be_set(tmp_path, data):
    folder = saved(bert(), tmp_path / "model")
    assert audit(folder, text=data["text"]).alerts == []
    found = audit(folder, text=data["text"], activation_thresholds=Thresholds(entropy_share=1.0)).alerts
    assert {a["alert"] for a in found} == {"sharp_head"}
    assert len(found) == 4


def test_a_model_of_texts_and_images_takes_both_in_one_batch(tmp_path, data):
    folder = saved(clip(), tmp_path / "model")
    found = audit(folder, **data)
    read = {r["site"].split(".")[0] for r in found.records if r["statistic"] == "attention_entropy"}
    assert read == {"text_model", "vision_model"}
    for name, path in data.items():
        refused(folder, "CLIPModel did not run on the data .*pass text= and images=", **{name: path})


def test_a_model_that_takes_no_text_says_so_and_does_not_fall(tmp_path, data):
    config = tf.WhisperConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=16, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    folder = saved(tf.WhisperModel(config), tmp_path / "model")
    refused(folder, "WhisperModel did not run on the data", text=data["text"])


def test_positions_that_are_counted_from_after_the_padding_are_left_free(tmp_path, data):
    config = tf.RobertaConfig(**SIZES, vocab_size=40, max_position_embeddings=34, pad_token_id=1)
    folder = saved(tf.RobertaModel(config), tmp_path / "model")
    found = audit(folder, text=data["text"])
    assert any(r["statistic"] == "attention_entropy" for r in found.records)


def test_calls_are_read_as_they_are_in_evaluation(tmp_path, data, monkeypatch):
    from headwise.health.watching.recorder import Recorder

    modes, take = [], Recorder.take

    def spied(self, call, *others):
        take(self, call, *others)
        modes.append(call.training)

    monkeypatch.setattr(Recorder, "take", spied)
    found = audit(saved(bert(), tmp_path / "model"), text=data["text"])
    assert modes == [False, False]
    assert any(record["statistic"] == "stream_cosine" for record in found.records)


BLOCKED = """
import builtins, importlib, sys

# For headwise alone: torch and transformers look for some of them on their own account.
own, load = builtins.__import__, importlib.import_module

def refused(name):
    if name.split(".")[0] in {blocked}:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def watched(name, globals=None, *others, **given):
    if str((globals or {{}}).get("__name__")).startswith("headwise"):
        refused(name)
    return own(name, globals, *others, **given)

def loaded(name, package=None):
    if sys._getframe(1).f_globals["__name__"].startswith("headwise"):
        refused(name)
    return load(name, package)

builtins.__import__, importlib.import_module = watched, loaded
import headwise

found = headwise.audit({folder!r}, text={text!r})
assert found.records and found.to_json(), "nothing was read"
assert not [name for name in sys.modules if name.startswith(("headwise.lab.comparing", "headwise.lab.studies"))]
"""


@pytest.mark.grid
def test_an_audit_needs_none_of_the_packages_of_studies(tmp_path, data):
    blocked = [
        "accelerate",
        "altair",
        "jinja2",
        "optuna",
        "psutil",
        "pydantic",
        "rich",
        "scipy",
        "sklearn",
        "vl_convert",
    ]
    folder = saved(bert(), tmp_path / "model")
    code = BLOCKED.format(blocked=blocked, folder=str(folder), text=str(data["text"]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
