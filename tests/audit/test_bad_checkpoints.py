"""Checkpoints that are corrupt, truncated, pickled or unknown give a clear error, and their code never runs."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch
import transformers as tf
from audit.spoiled_checkpoints import change, good, refused
from safetensors.torch import load_file, save_file

from headwise.health.auditing.audit import CheckpointError, audit


@pytest.fixture
def folder(tmp_path):
    """A small good folder to spoil."""
    return good(tmp_path / "model")


def test_a_truncated_file_is_named_with_its_size(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    refused(folder, r"model\.safetensors is not a complete safetensors file .*2,000 bytes.*Download it again")


@pytest.mark.parametrize("content", [b"", b"\xff" * 400, b"<html>404</html>"])
def test_a_file_of_another_kind_is_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "is not a complete safetensors file")


def test_flipped_header_bytes_are_refused(folder):
    path = folder / "model.safetensors"
    spoiled = bytearray(path.read_bytes())
    spoiled[8:40] = bytes(32)
    path.write_bytes(bytes(spoiled))
    refused(folder, "is not a complete safetensors file")


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_unread_with_the_remedy(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    refused(folder, rf"holds its weights as {re.escape(name)}\. Unpickling can run code.*weights_only=True")
    refused(str(folder / name), "is pickled. Unpickling can run code")
    refused(f"vit_tiny_patch16_224:{folder / name}", "is pickled. Unpickling can run code")
    assert not (tmp_path / "ran").exists()


def test_code_of_a_checkpoint_is_never_run(folder, tmp_path):
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change(folder, model_type="own", auto_map={"AutoConfig": "modeling_own.C", "AutoModel": "modeling_own.M"})
    refused(folder, "the model type 'own' .* lives in code of the checkpoint, which headwise never runs")
    assert not (tmp_path / "ran").exists()
    # A known type with its own code beside it is read as the known one.
    change(folder, model_type="llama", auto_map={"AutoConfig": "modeling_own.C", "AutoModel": "modeling_own.M"})
    assert audit(folder).records
    assert not (tmp_path / "ran").exists()


def test_unknown_types_and_configs_are_refused(folder):
    change(folder, model_type="gpt99")
    refused(folder, r"transformers .* knows no model type 'gpt99'")
    (folder / "config.json").write_text('{"hidden_size": 4}')
    refused(folder, "has no model_type")
    (folder / "config.json").write_text('{"hidden_size": ')
    refused(folder, r"config\.json is not JSON .*truncated or corrupt")
    (folder / "config.json").write_text("[1]")
    refused(folder, "holds list, not an object")
    (folder / "config.json").unlink()
    refused(folder, "holds no config.json")


def test_quantized_weights_are_refused(folder):
    change(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(folder, r"is quantized \(gptq\).*audit the model it was made from")


def test_a_config_that_does_not_belong_is_named_by_its_first_weight(folder):
    change(folder, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    refused(folder, r"q_proj\.weight has the shape \(16, 16\) in the checkpoint and \(32, 16\) by its config")


def test_a_missing_weight_is_named(folder):
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.self_attn.k_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"model\.layers\.1\.self_attn\.k_proj\.weight")


def test_a_missing_shard_is_named(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(state, folder / "model-00001-of-00002.safetensors")
    shards = dict.fromkeys(state, "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**shards, "lm_head.weight": "model-00002-of-00002.safetensors"}}))
    refused(folder, "names the shard 'model-00002-of-00002.safetensors', which is not in")
    index.write_text(json.dumps({"weight_map": {**shards, "lm_head.weight": "../../outside.safetensors"}}))
    refused(folder, "names the shard '../../outside.safetensors'")
    index.write_text("{}")
    refused(folder, "has no weight_map")


def test_a_config_of_thousands_of_layers_is_refused_before_anything_is_built(folder, monkeypatch):
    from headwise.health.auditing import transformers_folder

    built = []
    plain = transformers_folder.structure_of
    monkeypatch.setattr(
        transformers_folder,
        "structure_of",
        lambda folder, config, settings: built.append(config.num_hidden_layers) or plain(folder, config, settings),
    )
    change(folder, num_hidden_layers=20_000)
    refused(
        folder, r"config\.json claims num_hidden_layers=20,000, and the tensors of .* are numbered for 2 layers at most"
    )
    assert max(built, default=0) <= 2


def test_thousands_of_experts_are_refused_too(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    config = tf.SwitchTransformersConfig(**sizes, num_experts=2, num_sparse_encoder_layers=1)
    tf.SwitchTransformersModel(config).save_pretrained(tmp_path)
    change(tmp_path, num_experts=30_000)
    refused(tmp_path, r"claims num_experts=30,000, and the tensors of")


def test_layers_that_share_their_weights_may_be_more_than_the_tensors(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 40}
    tf.AlbertModel(tf.AlbertConfig(**sizes, embedding_size=16, num_hidden_layers=24)).save_pretrained(tmp_path)
    assert audit(tmp_path).records


def test_sizes_that_tensors_do_not_have_are_refused_before_a_model_of_them_is_made(tmp_path, monkeypatch):
    from headwise.health.auditing import transformers_folder

    tf.GPT2Model(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers_folder, "Shallow", None)
    change(tmp_path, n_embd=4096)
    refused(tmp_path, r"has the shape \(16, 48\) in the checkpoint and \(4096, 12288\) by its config")


def test_a_folder_saved_before_folding_says_to_fold(folder):
    import headwise

    model = tf.LlamaForCausalLM.from_pretrained(folder)
    handle = headwise.regularize(model, headwise.SigmaReparam())
    model.save_pretrained(folder)
    refused(folder, r"was saved while SigmaReparam parametrized its weights.*q_proj|k_proj.*call handle\.fold\(\)")
    handle.fold()
    model.save_pretrained(folder)
    assert audit(folder).records


def test_a_parametrization_of_torchs_own_is_told_apart(folder):
    model = tf.LlamaForCausalLM.from_pretrained(folder)
    torch.nn.utils.parametrizations.spectral_norm(model.model.layers[0].self_attn.q_proj)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    refused(folder, r"a parametrization of torch.*remove_parametrizations")


def test_a_compressed_model_is_told_apart(folder):
    import headwise

    model = tf.LlamaForCausalLM.from_pretrained(folder)
    headwise.compress(model, 0.8, parts="vo")
    model.save_pretrained(folder)
    refused(
        folder,
        r"saved after headwise\.compress: it holds "
        r"model\.layers\.0\.self_attn\.[vo]_proj\.inner\.weight.*load_compressed",
    )


def test_bloom_is_told_why_and_what_to_do(tmp_path):
    config = tf.BloomConfig(hidden_size=16, n_layer=5, n_head=2, vocab_size=40)
    tf.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"(?s)h\.0\.self_attention \(BloomAttention\) keeps queries.*q_proj, k_proj and v_proj"
    ) as told:
        audit(tmp_path)
    assert str(told.value).endswith("and 2 more layers")
    assert "no counterpart" not in str(told.value)


def test_adapters_and_empty_folders_say_what_they_are(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "holds an adapter, not a model: merge it")
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    refused(folder, "holds no model.safetensors and no model.safetensors.index.json; it holds config.json")


def test_what_is_no_checkpoint_at_all_gets_the_list_of_forms(folder, tmp_path):
    refused("nowhere", "there is no checkpoint 'nowhere': give a transformers folder, TIMM_NAME:FILE.safetensors, or")
    refused(folder / "model.safetensors", "alone does not show which model it is")
    refused(
        "vit_tiny_patch16_2244:weights.safetensors",
        "has no model 'vit_tiny_patch16_2244'. Did you mean 'vit_tiny_patch16_224'",
    )
    refused("vit_tiny_patch16_224:missing.safetensors", "there is no file missing.safetensors")
    refused(f"{tmp_path / 'none.py'}:build", "there is no file .*none.py")


def test_data_a_model_does_not_take_is_refused(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words")
    refused(folder, "has no tokenizer that transformers can load", text=text)
    refused(folder, "this model takes no images", images=tmp_path)
    refused(folder, "there is no text file", text=tmp_path / "none.txt")


def test_a_model_without_attention_is_refused(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2)\ndef wrong():\n    return 3\n")
    with pytest.raises(ValueError, match=r"plain\.py:build: Linear has no attention layer that headwise can see"):
        audit(f"{file}:build")
    refused(f"{file}:wrong", r"plain\.py:wrong returned int, not a torch module")
    refused(f"{file}:biuld", r"has no function 'biuld'\. Did you mean 'build'")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 10_000 + "}", "null", ""])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "adapter_config.json"])
def test_hostile_json_is_one_sentence_with_the_file(folder, name, content):
    (folder / name).write_text(content)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} (is not JSON|holds)") as raised:
        audit(folder)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_json_of_a_depth_that_no_config_has_is_refused(folder):
    change(folder, more=json.loads("[" * 900 + "]" * 900))
    refused(folder, r"config\.json is not JSON \(nested more than 100 deep\)")


@pytest.mark.parametrize("shard", [["b"], {}, {"a": {}}, None, "", ".", "..", "\0", 1])
def test_an_index_that_names_no_file_is_refused(folder, shard):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    refused(folder, "names the shard .*, which is not in")
