"""What an audit tells by name: weights that are not finite, prefixes, adapters and numbers of 8 bits."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from audit.spoiled_checkpoints import good, refused
from safetensors.torch import load_file, save_file
from torch import nn

from headwise.health.auditing.audit import audit
from headwise.health.auditing.summary import lead


@pytest.fixture
def folder(tmp_path):
    """A small good folder."""
    return good(tmp_path / "model")


class Fused(nn.Module):
    """An own layer with one matrix for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(16, 48), nn.Linear(16, 16), 4

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Own(nn.Module):
    """Two own layers, one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Fused(), Fused()])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"])
def test_a_layer_that_is_not_finite_is_counted_and_told_by_its_weight(name, value):
    model = Own()
    weight = model.layers[1].get_parameter(name)
    with torch.no_grad():
        weight.view(-1)[3] = value
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    found = audit(model)
    assert [alert["sentence"] for alert in found.alerts if alert["alert"] == "not_finite"] == [
        f"layers.1.{name} holds NaN or infinity: its figures are left out"
    ]
    assert "2 layers, 8 heads, 1 alerts" in repr(found) and "of 8 heads in 2 layers" in lead(found)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(9.0), before[key].nan_to_num(9.0))


def test_a_model_of_nothing_but_nan_is_told_of_too():
    model = Own()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    found = audit(model)
    assert len(found.alerts) == 8 and "2 layers, 8 heads" in repr(found)


def test_a_bias_in_the_files_that_is_not_finite_is_told(tmp_path):
    import transformers as tf

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tf.BertModel(tf.BertConfig(**sizes, vocab_size=40)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = next(key for key in state if key.endswith("self.query.bias"))
    state[name][0] = math.nan
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any(name in alert["sentence"] for alert in audit(tmp_path).alerts)


def figures(found):
    return [(record["statistic"], record["site"], record["value"]) for record in found.records]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrapped_models_are_left_out_and_told(folder, prefix):
    plain = audit(folder)
    state = load_file(folder / "model.safetensors")
    save_file({prefix + name: weight for name, weight in state.items()}, folder / "model.safetensors")
    found = audit(folder)
    assert figures(found) == figures(plain) and not found.unused
    assert f"hold {prefix}, which is left out" in found.notes()[0] and not any(prefix in note for note in plain.notes())


def test_names_of_layers_that_were_compiled_one_by_one_are_read(folder):
    plain = audit(folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if ".layers.0." in name]:
        state[name.replace(".layers.0.", ".layers.0._orig_mod.")] = state.pop(name)
    save_file(state, folder / "model.safetensors")
    assert figures(audit(folder)) == figures(plain)


def text(place):
    """Give the folder a tokenizer, and return a text that it reads."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(40)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (place / "text.txt").write_text(" ".join(f"w{i % 39}" for i in range(60)))
    return place / "text.txt"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_in_the_folder_changes_neither_weights_nor_activations_and_is_told(folder):
    peft = pytest.importorskip("peft")
    import transformers as tf

    file = text(folder)
    plain = audit(folder, text=file)
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder)
    found = audit(folder, text=file)
    assert figures(found) == figures(plain)
    assert "also holds an adapter, which is not read" in found.notes()[0]


def test_a_folder_of_an_adapter_alone_is_told_with_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/model"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    refused(tmp_path, r"holds an adapter, not a model: merge it into its base model someone/model \(merge_and_unload")


def test_numbers_of_eight_bits_are_told_and_refused_if_they_have_scales(folder):
    state = load_file(folder / "model.safetensors")
    name = next(key for key in state if key.endswith("q_proj.weight"))
    state[name] = state[name].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors")
    assert f"8-bit numbers without scales are read as they are: {name}" in audit(folder).notes()
    for last in ("weight_scale_inv", "weight_scale"):
        scale = f"{name.rpartition('.')[0]}.{last}"
        save_file({**state, scale: torch.ones(1)}, folder / "model.safetensors")
        refused(folder, rf"{name} in 8 bits with the scale {scale}, so that its numbers are not the weights")
