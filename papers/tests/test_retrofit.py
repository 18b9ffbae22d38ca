"""A trained Llama that methods are switched on in: its weights are where transformers wants them, 8 bits are 8 bits,
what a method brought is put back, and the study runs at its least size."""

from __future__ import annotations

import re
import runpy
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from headwise_papers.data import stories260k, stories260k_llama
from headwise_papers.retrofit import GATES, STUDY, WARMED
from headwise_papers.tasks import story_teller
from headwise_papers.tasks.eight_bits import in_8_bits, rounded
from headwise_papers.tasks.story_teller import SWITCHED_ON, StoryTeller
from small_studies import carry

import headwise
from headwise.attend import methods
from headwise.lab.comparing.claim_check import canonical_claims
from headwise.lab.experiments.arm import read_arms

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama2c_to_transformers.py"
# width, width of the MLP, layers, heads, groups, vocabulary, length
SIZES = (16, 24, 2, 4, 2, 330, 64)


@pytest.fixture
def model_files(text, monkeypatch):
    """Return the folder of a text and of a random model in files of llama2.c, whose tokens are bytes and letters."""
    for name, file in (("SOURCE", stories260k.NAME), ("TOKENIZER", stories260k.TOKENS)):
        monkeypatch.setattr(stories260k, name, replace(getattr(stories260k, name), files={file: None}))
    folder = text / "stories260K"
    folder.mkdir()
    width, inner, layers, heads, groups, vocabulary, length = SIZES
    kv = width // heads * groups
    count = vocabulary * width + layers * (2 * width + 2 * width**2 + 2 * kv * width + 3 * inner * width) + width
    numbers = torch.randn(count + length * (width // heads), generator=torch.Generator().manual_seed(0)) * 0.3
    (folder / stories260k.NAME).write_bytes(struct.pack("7i", *SIZES) + numbers.numpy().tobytes())
    pieces = ["", "", "", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 33 + vocabulary - 259))]
    coded = [(float(-at), piece.encode()) for at, piece in enumerate(pieces)]
    written = b"".join(struct.pack("fi", score, len(piece)) + piece for score, piece in coded)
    (folder / stories260k.TOKENS).write_bytes(struct.pack("i", 8) + written)
    return text


def test_the_weights_are_those_of_the_example_that_converts_them(model_files):
    example = runpy.run_path(str(EXAMPLE))
    settings, weights = example["read_model"](model_files / "stories260K" / stories260k.NAME)
    wanted = example["model_of"](settings, weights).state_dict()
    found = stories260k_llama.llama(model_files).state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rows_are_rounded_to_multiples_up_to_127_and_the_model_stays(model_files):
    weight = torch.randn(5, 40)
    scale = weight.abs().amax(1, keepdim=True) / 127
    multiples = rounded(weight) / scale
    torch.testing.assert_close(multiples, multiples.round(), atol=1e-3, rtol=0)
    assert ((rounded(weight) - weight).abs() <= scale / 2 + 1e-7).all() and multiples.abs().max() <= 127.001
    model = stories260k_llama.llama(model_files)
    tokens = torch.arange(8)[None]
    before = model(input_ids=tokens).logits
    with in_8_bits(model):
        assert 0 < (model(input_ids=tokens).logits - before).abs().max() < 0.3
    assert torch.equal(model(input_ids=tokens).logits, before)


def test_what_a_method_brought_is_put_back_for_one_pass(model_files):
    task = StoryTeller().located(model_files)
    model, plain = task.model(), task.model()
    handle = headwise.regularize(model, headwise.LayerScale(start=1.0))
    with torch.no_grad():
        for name in handle.brought:
            model.get_parameter(name).add_(0.25)
    tokens = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        moved = model(**tokens).logits
        torch.testing.assert_close(task._put_back(model, tokens).logits, plain(**tokens).logits)
        assert torch.equal(model(**tokens).logits, moved) and (moved - plain(**tokens).logits).abs().max() > 0.01
    assert float(task._moved(model, tokens)) == pytest.approx(0.25)
    assert float(task._moved(plain, tokens)) == 0


def test_stories_are_what_the_model_tells_and_splits_share_nothing(model_files):
    task = StoryTeller(context=8).located(model_files)
    told = task.data("stories")
    assert told["input_ids"].shape == (story_teller.STORIES, 8)
    assert torch.equal(told["input_ids"][:, 1:], told["labels"][:, :-1])
    assert len(story_teller.plays(model_files, "train", 8)) > 7 * len(story_teller.plays(model_files, "test", 8)) > 0


def test_the_study_runs_at_its_least_size(model_files, tmp_path):
    canonical_claims(STUDY)
    assert len(STUDY.arms) == 27 and STUDY.scales["small"].seeds == 6
    small = {"steps": 2, "batch_size": 2, "context": 8, "test_size": 6, "warmup": 0}
    task = StoryTeller(**STUDY.task.model_dump() | small).located(model_files)
    methods = tuple(read_arms((GATES[1], "XSA(strength=1.0)", WARMED["XSA(strength=1.0)"]), task))
    update = {"task": task, "methods": methods, "seeds": 1, "claims": (), "premises": ()}
    results = carry(STUDY.model_copy(update=update), tmp_path / "out", data=model_files)
    assert [result["status"] for result in results] == ["finished"] * 4
    plain, gate, acting, _ = (result["metrics"] for result in results)
    on = f"{SWITCHED_ON}/stories/loss"
    assert gate[on] == pytest.approx(plain[on], abs=1e-6) and acting[on] != pytest.approx(plain[on], abs=1e-6)
    assert plain[on] != plain["stories/loss"] and plain["own/moved"] == plain["reset/worth"] == 0
    assert 0 < gate["own/moved"] < 0.01 and gate["reset/loss"] != gate["test/loss"]
    assert gate["int8/rise"] == pytest.approx(gate["int8/loss"] - gate["test/loss"])


def test_the_page_names_every_method_once():
    page = (EXAMPLE.parents[1] / "docs" / "shipping.md").read_text(encoding="utf-8")
    table = page.partition("<!-- retrofit: begin")[2].partition("<!-- retrofit: end")[0]
    named = re.findall(r"`(\w+(?:\([^`]*)?)`", table)
    assert len(named) == len(set(named))
    # a method with two starts stands there twice
    assert {one.partition("(")[0] for one in named} == set(methods.__all__)


@pytest.mark.parametrize(
    ("on", "at_once", "warmed", "wanted"),
    [
        (0.001, 0.01, 0.2, "yes"),
        (0.4, 0.01, 0.01, "yes, once fine-tuned"),
        (0.4, 0.1, 0.01, "with warm-up"),
        (0.4, 0.1, 0.2, "no"),
        (0.0, 0.03, 0.03, "undecided"),
    ],
)
def test_the_page_says_what_follows_from_the_margins(on, at_once, warmed, wanted):
    table = runpy.run_path(str(EXAMPLE.parents[1] / "docs" / "retrofit_table.py"))
    arm, noise = "XSA(strength=1.0)", (-0.004, 0.004, -0.002, 0.002, -0.003, 0.003)
    plain = {seed: 3.0 + seed for seed in range(6)}
    figures = {}
    for name, label, shift in (("test/loss", arm, at_once), ("test/loss", WARMED[arm], warmed)):
        figures[name, label] = {seed: value + shift + noise[seed] for seed, value in plain.items()}
    figures["test/loss", "baseline"] = plain
    figures |= {
        (table["START"], "baseline"): dict.fromkeys(plain, 1.2),
        (table["START"], arm): dict.fromkeys(plain, 1.2 + on),
    }
    assert table["Row"](arm, figures).verdict == wanted
