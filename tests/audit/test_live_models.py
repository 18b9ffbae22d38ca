"""An audit of a model in memory, of a hub's cache, and of a name that was not downloaded."""

import pytest
import torch

import headwise
from headwise.files.errors import CheckpointError
from headwise.health.auditing.opening import snapshot_of

transformers = pytest.importorskip("transformers")


def tiny():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def figures(found):
    return [(record["statistic"], record["site"], record["value"]) for record in found.records]


def test_a_model_in_memory_is_read_as_its_folder_is_and_left_as_it_is(tmp_path):
    model = tiny().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    assert figures(headwise.audit(model)) == figures(headwise.audit(tmp_path))
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_hubs_cache_is_read_by_folder_and_by_name(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    cache = tmp_path / "models--me--tiny"
    tiny().save_pretrained(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert figures(headwise.audit(cache)) == figures(headwise.audit("me/tiny"))
    with pytest.raises(
        CheckpointError, match=r"'me/other' is not a folder here.*hf download me/other, then give the same name"
    ):
        headwise.audit("me/other")


def test_an_old_name_of_the_hub_has_no_owner(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    tiny().save_pretrained(tmp_path / "models--tiny")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert headwise.audit("tiny")
    with pytest.raises(CheckpointError, match=r"no checkpoint 'gpt2': give a transformers folder.*hf download gpt2"):
        headwise.audit("gpt2")


def test_a_cache_of_several_snapshots_without_a_main_one_is_told(tmp_path):
    for name in ("abc", "def"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"names no main snapshot; it holds abc, def. Give one of"):
        snapshot_of(tmp_path)
