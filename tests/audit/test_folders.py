"""Audits of transformers folders with other layouts: read in place, layer by layer, the layout verified."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn

from headwise.attend import hosts, projections
from headwise.health.auditing.audit import audit
from headwise.health.auditing.opening import open_checkpoint
from headwise.health.auditing.weights import read_checkpoint
from headwise.health.statistics.weights import read_weights, weight_reading

BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
    ),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**BASE, bos_token_id=1, eos_token_id=2)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**BASE, **IDS, num_key_value_heads=2)),
    "modernbert": lambda: tf.ModernBertModel(tf.ModernBertConfig(**BASE, **IDS, cls_token_id=1, sep_token_id=2)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**BASE, num_key_value_heads=2, head_dim=8)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99)
    ),
    "vit": lambda: tf.ViTModel(tf.ViTConfig(**{**BASE, "num_hidden_layers": 2}, image_size=16, patch_size=8)),
}


def saved(name: str, folder, **options) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return model


def figures_of(model: nn.Module) -> dict:
    """Compute the records' values on the model in memory."""
    want = {}
    for found in hosts.find(model):
        for name, values in read_weights(weight_reading(found.site, projections.find(found.site, model))).items():
            want.update({(found.site.name, name, i): v for i, v in enumerate(values.tolist())})
    return want


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_reads_like_the_model_in_memory(name, tmp_path):
    model = saved(name, tmp_path)
    found = audit(tmp_path)
    got = {(r["site"], r["statistic"], r.get("group", r["head"])): r["value"] for r in found.records}
    want = figures_of(model)
    assert got.keys() == want.keys()
    assert list(got.values()) == pytest.approx([want[key] for key in got], rel=1e-4, abs=1e-6)


def test_shards_are_read_where_they_lie(tmp_path):
    saved("neox", tmp_path / "one")
    saved("neox", tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert audit(tmp_path / "many").records == audit(tmp_path / "one").records


def test_half_precision_weights_are_read_in_full(tmp_path):
    model = MODELS["qwen3"]().bfloat16()
    model.save_pretrained(tmp_path)
    found = audit(tmp_path)
    want = figures_of(model.float())
    for record in found.records:
        key = (record["site"], record["statistic"], record.get("group", record["head"]))
        assert record["value"] == pytest.approx(want[key], rel=1e-4, abs=1e-6)


def test_query_and_key_norms_are_said_to_lift_the_law(tmp_path):
    saved("qwen3", tmp_path)
    found = audit(tmp_path)
    assert any("law of weight decay does not apply" in note for note in found.notes())
    assert all("does not apply" in layer["reasons"]["imbalance_qk"] for layer in found.layers)
    assert not [r for r in found.records if r["statistic"] in ("imbalance_qk", "nuclear_gap_qk")]
    assert [r for r in found.records if r["statistic"] == "imbalance_vo"]


def test_cross_attention_is_told_apart(tmp_path):
    saved("t5", tmp_path)
    kinds = {layer["site"]: layer["cross"] for layer in audit(tmp_path).layers}
    assert kinds["decoder.block.0.layer.1.EncDecAttention"]
    assert not kinds["decoder.block.0.layer.0.SelfAttention"]


def test_one_layer_at_a_time_is_in_memory(tmp_path):
    saved("phi3", tmp_path)
    opened = open_checkpoint(tmp_path)
    reads: list[set[str]] = []
    plain = opened.tensors

    def counted(names):
        held = [n for n, p in opened.model.named_parameters() if p.device.type != "meta"]
        assert held == []
        reads.append(set(names))
        return plain(names)

    opened.tensors = counted
    steps = []
    read_checkpoint(opened, lambda done, of: steps.append((done, of)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert reads[0] == {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight"}
    assert all(p.device.type == "meta" for p in opened.model.parameters())


def test_an_audit_leaves_random_state_and_threads_as_they_were(tmp_path):
    saved("gpt2", tmp_path)
    state, known = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        audit(tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(known)
    assert torch.equal(torch.get_rng_state(), state)


def test_damaged_numbers_are_an_alert_and_the_other_layers_are_read(tmp_path):
    model = saved("gpt2", tmp_path)
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    found = audit(tmp_path)
    assert [a["alert"] for a in found.alerts if a["alert"] == "not_finite"] == ["not_finite"]
    assert {r["site"] for r in found.records} == {"transformer.h.0.attn", "transformer.h.2.attn"}
    assert "NaN" not in found.to_json().replace("holds NaN", "")


def test_images_are_read_by_a_vision_model(tmp_path):
    from PIL import Image

    saved("vit", tmp_path / "model")
    (tmp_path / "images").mkdir()
    for index in range(3):
        Image.new("RGB", (20, 30), (80 * index, 40, 10)).save(tmp_path / "images" / f"{index}.png")
    found = audit(tmp_path / "model", images=tmp_path / "images")
    entropies = [r["value"] for r in found.records if r["statistic"] == "attention_entropy"]
    assert len(entropies) == 8
    assert all(0 < entropy <= torch.log(torch.tensor(5.0)) + 1e-4 for entropy in entropies)


def test_weights_that_transformers_converts_are_read_through_its_own_loader(tmp_path, monkeypatch):
    from headwise.health.auditing import transformers_folder

    model = saved("qwen3", tmp_path)
    renamer = transformers_folder._renamer

    def converting(of, wanted):
        rename = renamer(of, wanted)

        def converted(name):
            target, whole = rename(name)
            return target, whole and "k_proj" not in name

        return converted

    monkeypatch.setattr(transformers_folder, "_renamer", converting)
    got = {(r["site"], r["statistic"], r.get("group", r["head"])): r["value"] for r in audit(tmp_path).records}
    assert got == pytest.approx(figures_of(model), rel=1e-4, abs=1e-6)
