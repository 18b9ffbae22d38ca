"""Audits of real pretrained models, against figures computed from their own weights by definition."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from headwise.health.auditing.audit import audit


def value(found, site, statistic, head=None, group=None):
    """Return the one record of a place."""
    hits = [
        r
        for r in found.records
        if r["site"] == site and r["statistic"] == statistic and r["head"] == head and r.get("group") == group
    ]
    assert len(hits) == 1
    return hits[0]["value"]


def test_the_converted_model_tells_its_stories(stories, story):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True).strip() == text
    assert ids[0, 0] == tokenizer.bos_token_id
    # A model whose rotary rows were left in the other order is far worse.
    loss = model(input_ids=ids, labels=ids).loss
    assert loss < 0.5
    with torch.no_grad():
        for layer in model.model.layers:
            for name, heads in (("q_proj", 8), ("k_proj", 4)):
                weight = getattr(layer.self_attn, name).weight
                weight.copy_(weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).clone())
    assert model(input_ids=ids, labels=ids).loss > loss + 0.5


def test_figures_of_the_llama_are_those_of_its_products(stories):
    found = audit(stories)
    assert (found.kind, found.model) == ("transformers folder", "LlamaForCausalLM")
    layer = AutoModelForCausalLM.from_pretrained(stories).model.layers[3].self_attn
    q, k, v = (getattr(layer, f"{n}_proj").weight.detach().double() for n in "qkv")
    o = layer.o_proj.weight.detach().double()
    site = "model.layers.3.self_attn"
    for head in range(8):
        rows, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
        qk, vo = torch.linalg.svdvals(k[shared].T @ q[rows]), torch.linalg.svdvals(o[:, rows] @ v[shared])
        for kind, values in (("qk", qk), ("vo", vo)):
            assert value(found, site, f"spectral_norm_{kind}", head) == pytest.approx(values[0].item(), rel=1e-5)
            assert value(found, site, f"nuclear_norm_{kind}", head) == pytest.approx(values.sum().item(), rel=1e-5)
            assert found.spectra[f"{site}|{head}|{kind}"] == pytest.approx(values[:8].tolist(), abs=1e-5)
    # Grouped queries: sums over the group; queries and keys with rotary positions: traces of rotary pairs.
    own = sum(o[:, 8 * h : 8 * h + 8].T @ o[:, 8 * h : 8 * h + 8] for h in (2, 3))
    shared = v[8:16] @ v[8:16].T
    norm = torch.linalg.matrix_norm
    want = norm(own - shared) / (norm(own) + norm(shared))
    assert value(found, site, "imbalance_vo", group=1) == pytest.approx(want.item(), rel=1e-5)
    pairs = lambda w: w.square().sum(1)[:4] + w.square().sum(1)[4:]
    own, shared = pairs(q[16:24]) + pairs(q[24:32]), pairs(k[8:16])
    want = (own - shared).norm() / (own.norm() + shared.norm())
    assert value(found, site, "imbalance_qk", group=1) == pytest.approx(want.item(), rel=1e-5)
    assert any("at the same position" in note for note in found.notes())
    assert any("8 query heads share 4 key/value heads" in note for note in found.notes())


def test_figures_of_the_encoder_are_those_of_its_products(encoder):
    found = audit(encoder)
    assert len({r["site"] for r in found.records}) == 6
    layer = AutoModel.from_pretrained(encoder).encoder.layer[2].attention
    q, k = layer.self.query.weight.detach().double()[32:64], layer.self.key.weight.detach().double()[32:64]
    values = torch.linalg.svdvals(k.T @ q)[:32]
    site = "encoder.layer.2.attention.self"
    assert value(found, site, "stable_rank_qk", 1) == pytest.approx(
        (values.square().sum() / values[0] ** 2).item(), rel=1e-4
    )
    o, v = layer.output.dense.weight.detach().double()[:, 32:64], layer.self.value.weight.detach().double()[32:64]
    gap = 0.5 * (o.square().sum() + v.square().sum())
    gap = (gap - torch.linalg.svdvals(o @ v).sum()) / gap
    assert value(found, site, "nuclear_gap_vo", 1) == pytest.approx(gap.item(), rel=1e-3)
    assert any("leave out the biases of" in note for note in found.notes())


def test_the_worst_head_of_the_encoder_is_the_one_without_entropy(encoder, story):
    found = audit(encoder, text=story)
    worst = found.worst()
    assert (worst[0]["site"], worst[0]["head"]) == ("encoder.layer.0.attention.self", 2)
    assert any("entropy" in reason for reason in worst[0]["reasons"])
    assert len(worst) == 5
    assert value(found, "encoder.layer.0.attention.self", "entropy_share", 2) < 0.05
    assert found.data == "story.txt"
    (alert,) = [a for a in found.alerts if a["alert"] == "sharp_head"]
    assert alert["sentence"].startswith("the entropy of encoder.layer.0.attention.self head 2 is below 5 %")


def test_activations_of_the_llama_are_read_on_a_text(stories, story):
    found = audit(stories, text=story)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories, attn_implementation="eager"), None
    tokenizer = AutoTokenizer.from_pretrained(stories)
    ids = tokenizer(story.read_text())["input_ids"]
    length = min(256, len(ids))
    maps = model(torch.tensor([ids[:length]]), output_attentions=True).attentions[4][0, 3].detach().double()
    want = -(maps * maps.clamp(min=1e-300).log()).sum(-1).mean().item()
    assert len(ids) < 512
    assert value(found, "model.layers.4.self_attn", "attention_entropy", 3) == pytest.approx(want, rel=0.02)


def test_the_report_and_the_json_are_written(stories, tmp_path):
    found = audit(stories, out=tmp_path / "deep" / "report.html", command="headwise audit stories260K")
    page = (tmp_path / "deep" / "report.html").read_text()
    assert "W_KᵀW_Q" in page
    assert "headwise audit stories260K" in page
    written = json.loads((tmp_path / "deep" / "report.json").read_text())
    site = "model.layers.1.self_attn"
    values = [r["value"] for r in found.records if (r["site"], r["statistic"]) == (site, "stable_rank_vo")]
    assert written["figures"]["stable_rank_vo"]["per"] == "head"
    assert written["figures"]["stable_rank_vo"]["values"][site] == pytest.approx(values, rel=1e-6)
    assert written["figures"]["imbalance_vo"]["per"] == "group"
    assert written["spectra"][f"{site}|2|vo"] == pytest.approx(found.spectra[f"{site}|2|vo"], rel=1e-3)
    assert written["worst"][0]["head"] == found.worst()[0]["head"]
    assert {"torch", "headwise", "transformers"} <= set(written["versions"])
    assert written["hardware"]["cores"] >= 1


def test_markdown_is_written_where_the_name_says_so(stories, tmp_path):
    assert audit(stories).write(tmp_path / "short.md") == (tmp_path / "short.md", tmp_path / "short.json")
    assert (tmp_path / "short.md").read_text().startswith("# Audit of stories260K")
    assert audit(stories).write(tmp_path / "named")[0].name == "named.html"


def test_the_command_prints_the_worst_heads_and_writes_the_files(stories, tmp_path, capsys, monkeypatch):
    from headwise.health.auditing.command import run

    monkeypatch.setenv("COLUMNS", "160")
    run(str(stories), None, None, tmp_path / "audit.html")
    shown = capsys.readouterr().out
    assert shown.index("The worst heads") < shown.index("All heads")
    assert re.search(r"Layer \d head \d", shown)
    assert (tmp_path / "audit.json").is_file()
    made = json.loads((tmp_path / "audit.json").read_text())["command"]
    assert made == f"headwise audit {stories} --out {tmp_path / 'audit.html'}"
