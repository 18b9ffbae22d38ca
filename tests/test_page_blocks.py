"""Python blocks of pages that no cell runs: they run unchanged, with small stand-ins for the reader's own
objects."""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import headwise

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=9))


def gpt():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=9, n_positions=8)
    ).eval()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_blocks_of_the_page_on_saving(monkeypatch):
    from transformers import AutoConfig, LlamaForCausalLM

    monkeypatch.setattr(headwise.Regularized, "push_to_hub", lambda handle, name: handle.save_pretrained("hub"))
    hub = types.SimpleNamespace(snapshot_download=lambda name: "hub")
    names = {"headwise": headwise, "AutoConfig": AutoConfig, "LlamaForCausalLM": LlamaForCausalLM}
    names |= {"huggingface_hub": hub, "model": llama(), "batch": {"input_ids": torch.zeros(1, 4, dtype=torch.long)}}
    names["handle"] = headwise.regularize(llama(), headwise.DropHead(p=0.2))
    save, load = blocks("shipping")
    exec(save, names)
    exec(load, names)
    assert repr(names["handle"]) == "Regularized(DropHead(p=0.2), 2 sites)" and Path("stock/config.json").is_file()


def test_the_blocks_of_the_page_on_heads():
    names: dict = {}
    for block in blocks("heads"):
        exec(block, names)
    assert {site: len(heads) for site, heads in names["least"].items()} and names["done"].attention.ratio < 1
    assert names["handle"].removed


def test_the_blocks_of_the_page_on_compressing():
    import safetensors.torch
    from transformers import AutoConfig, AutoModelForCausalLM

    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    names = {"model": gpt(), "batch": batch, "build": gpt, "torch": torch, "safetensors": safetensors}
    names |= {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    names["mean_loss"] = lambda model: model(**batch, labels=batch["input_ids"]).loss
    for block in blocks("compress"):
        exec(block, names)
    with torch.no_grad():
        assert torch.equal(names["again"].eval()(**batch).logits, names["model"](**batch).logits)


@pytest.mark.grid
def test_the_block_of_the_page_on_scripts():
    text = blocks("your_script")[0]
    for written, here in (
        ("python gpt.py", f"{sys.executable} {ROOT / 'examples' / 'script' / 'gpt.py'}"),
        ("300", "2"),
    ):
        assert written in text
        text = text.replace(written, here)
    names: dict[str, object] = {}
    exec(text.replace("seeds=6", "seeds=1, silent=True"), names)
    assert names["result"].verdicts == {"DropHead(p=0.1)": "undecided"}


def test_the_block_of_the_page_on_training_scripts():
    (text,) = blocks("training_script")

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model = Attention()
    with pytest.raises(ValueError, match="pass example=batch"):
        headwise.regularize(model, headwise.AttnScale())
    names = {"headwise": headwise, "model": model, "get_batch": lambda: (torch.randn(1, 3, 8), None)}
    exec(text, names)
    assert os.listdir() == [] and len(names["handle"].parameters()) == 1
