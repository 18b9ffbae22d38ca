"""Configs that are wrong give a clear error that names the file; none makes transformers fetch or run anything."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf
from audit.spoiled_checkpoints import change, good, refused
from safetensors.torch import load_file, save_file

from headwise.health.auditing.audit import audit


@pytest.fixture
def folder(tmp_path):
    """A small good folder to spoil."""
    return good(tmp_path / "model")


@pytest.fixture
def fetched(monkeypatch):
    """Notes each kernel that would be fetched from the Hub."""
    from transformers.integrations import hub_kernels

    seen = []

    def fetch(name, *others, **settings):
        seen.append(name)
        raise RuntimeError("a kernel was asked for")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *a, **k: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", fetch)
    return seen


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_config_cannot_name_a_kernel_to_fetch(folder, key, fetched):
    change(folder, **{key: "kernels-community/flash-attn"})
    assert audit(folder).records
    from headwise.health.auditing.opening import open_checkpoint

    opened = open_checkpoint(folder)
    assert opened.whole().config._attn_implementation in ("sdpa", "eager")
    assert fetched == []


def test_a_part_of_a_config_cannot_name_a_kernel_either(tmp_path, fetched):
    part = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = tf.CLIPTextConfig(**part, vocab_size=40), tf.CLIPVisionConfig(**part, image_size=16, patch_size=8)
    config = tf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    tf.CLIPModel(config).save_pretrained(tmp_path)
    change(tmp_path, attn_implementation={"text_config": "kernels-community/flash-attn"})
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["vision_config"]["_attn_implementation"] = "kernels-community/flash-attn"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert audit(tmp_path).records
    assert fetched == []


def test_a_quantization_of_a_part_is_refused_as_one_of_the_whole(tmp_path):
    part = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = tf.CLIPTextConfig(**part, vocab_size=40), tf.CLIPVisionConfig(**part, image_size=16, patch_size=8)
    config = tf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    tf.CLIPModel(config).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"]["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    refused(tmp_path, r"is quantized \(gptq\)")


WRONG = {
    "a size in words": ({"hidden_size": "abc"}, r"cannot be read as a config .*hidden_size"),
    "a negative size": (
        {"hidden_size": -3, "head_dim": None},
        r"config\.json (cannot be read as a config|gives no model)",
    ),
    "a size that heads do not divide": ({"num_attention_heads": 5, "head_dim": None}, r"config\.json (cannot|gives)"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, r"config\.json (cannot|gives).*ZeroDivisionError"),
    "a list of types": ({"model_type": ["llama"]}, r"knows no model type \['llama'\]"),
    "a number for an architecture": (
        {"architectures": [5]},
        "names the architecture 5, which must be the name of a class",
    ),
    "an architecture of another family": (
        {"architectures": ["BertModel"]},
        "has the model type 'llama', and the architecture BertModel belongs to another",
    ),
    "an unknown rotary type": ({"rope_parameters": {"rope_type": "weird"}}, r"gives no model \(KeyError: 'weird'\)"),
    "rotary settings in words": ({"rope_parameters": "x"}, "cannot be read as a config .*rope_parameters"),
    "an unknown activation": ({"hidden_act": "nope"}, r"gives no model \(KeyError: 'nope'\)"),
    "an unknown dtype": ({"dtype": "float99"}, r"cannot be read as a config .*float99"),
    "quantization in words": ({"quantization_config": "x"}, r"is quantized \(x\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_named_with_its_file(folder, case):
    settings, match = WRONG[case]
    change(folder, **settings)
    refused(folder, match)


def test_what_is_not_installed_is_no_fault_of_the_file(folder, monkeypatch):
    def missing(*arguments, **settings):
        raise ImportError("LlamaConfig needs a package that is not installed")

    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", missing)
    with pytest.raises(ImportError, match="needs a package"):
        audit(folder)


def test_an_architecture_that_is_no_list_is_read(folder):
    change(folder, architectures="LlamaForCausalLM")
    assert audit(folder).model == "LlamaForCausalLM"


def test_weights_of_eight_bits_are_read_as_the_numbers_they_are_and_integers_are_refused(folder):
    state = load_file(folder / "model.safetensors")
    save_file({name: w.to(torch.float8_e4m3fn) for name, w in state.items()}, folder / "model.safetensors")
    eight = {(r["site"], r["statistic"], r["head"]): r["value"] for r in audit(folder).records}
    save_file({name: w.to(torch.float8_e4m3fn).float() for name, w in state.items()}, folder / "model.safetensors")
    assert eight == {(r["site"], r["statistic"], r["head"]): r["value"] for r in audit(folder).records}
    save_file({name: (100 * w).to(torch.int8) for name, w in state.items()}, folder / "model.safetensors")
    refused(folder, r"q_proj\.weight holds torch.int8 instead of floating-point numbers")


def test_layers_that_the_config_leaves_out_are_told_of(folder):
    assert audit(folder).unused == []
    change(folder, num_hidden_layers=1)
    found = audit(folder)
    assert len(found.unused) == 4
    assert "the files hold 4 weights of attention layers that the model of this config does not" in found.notes()[0]
    assert "model.layers.1.self_attn" in found.notes()[0]


def test_a_checkpoint_without_a_finite_weight_is_told_of_as_such(folder, tmp_path):
    state = load_file(folder / "model.safetensors")
    save_file({name: w * torch.nan for name, w in state.items()}, folder / "model.safetensors")
    found = audit(folder, out=tmp_path / "report.html")
    assert found.records == []
    assert {a["alert"] for a in found.alerts} == {"not_finite"}
    assert len(found.alerts) == 8
    assert "holds NaN or infinity" in (tmp_path / "report.html").read_text()
