"""The language model of the studies: words and their unknown one, segments, the sliding window, norms, and the studies
end to end."""

import math

import pytest
import torch
from headwise_papers import neutreno_lm, sigma_lm
from headwise_papers.data import wikitext2
from headwise_papers.tasks.causal_transformer import CausalTransformer
from headwise_papers.tasks.language_model import (
    NOT_COUNTED,
    UNKNOWN,
    LanguageModel,
    encode,
    sliding,
    split_text,
    symbols,
)
from small_studies import carry

TEXT = {
    "train": " \n = The cat = \n \n the cat sat on the mat . <unk> sat \n" * 60,
    "validation": "the cat sat \n" * 20,
    "test": "the dog sat on the mat . \n" * 20,
}


@pytest.fixture
def text(monkeypatch):
    monkeypatch.setattr(wikitext2, "read", lambda folder, split: TEXT[split])
    monkeypatch.setattr(wikitext2, "prepare", lambda folder, tell: None)
    monkeypatch.setattr(wikitext2, "files", lambda folder: [])
    for kept in (symbols, encode):
        kept.cache_clear()
    yield
    for kept in (symbols, encode):
        kept.cache_clear()


def test_the_most_frequent_words_are_told_apart_and_the_rest_is_one_unknown_word(text):
    known = symbols(None, "words", 5)
    # four ends of lines in each round, two of some words: of equals the first stays first
    assert known["<unk>"] == UNKNOWN and known["<eos>"] == 1 and len(known) == 5
    codes = encode(None, "test", "words", 5)
    assert codes.tolist()[:8] == [
        known["the"],
        UNKNOWN,
        *(known.get(w, UNKNOWN) for w in "sat on the mat .".split()),
        1,
    ]
    # the text's own unknown words are unknown too, and no word of their own
    assert "<unk>" not in list(known)[1:] and len(symbols(None, "words", 1000)) == 10


def test_characters_are_read_as_they_are(text):
    known = symbols(None, "characters", 100)
    assert set(known) - {"<unk>"} == set(TEXT["train"])
    # d and g are in no training text
    assert (encode(None, "test", "characters", 100) == UNKNOWN).sum() == 2 * 20
    assert split_text("a b\n", "characters") == ["a", " ", "b", "\n"]


def test_every_word_is_predicted_once_by_segments_and_the_next_one_is_the_target(text):
    task = LanguageModel(context=7)
    inputs, targets = task.data("validation")
    codes = encode(None, "validation", "words", 2000)
    assert torch.equal(inputs.flatten(), codes[: inputs.numel()])
    assert torch.equal(targets.flatten(), codes[1 : inputs.numel() + 1])


def test_a_sliding_window_counts_all_of_its_first_place_and_then_the_last_word_alone():
    codes = torch.arange(10)
    inputs, targets = sliding(codes, 4)
    assert inputs.tolist() == [list(range(at, at + 4)) for at in range(6)]
    assert targets[0].tolist() == [1, 2, 3, 4]
    assert targets[1:, :-1].eq(NOT_COUNTED).all() and targets[1:, -1].tolist() == [5, 6, 7, 8, 9]
    # every word but the first is predicted once
    assert sorted(targets[targets != NOT_COUNTED].tolist()) == list(range(1, 10))


def test_perplexity_is_that_of_all_counted_words_whatever_the_batches(text):
    task = LanguageModel(context=3)
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(5, 3, 2000, generator=generator)
    targets = torch.randint(2000, (5, 3), generator=generator)
    targets[1:, :2] = NOT_COUNTED
    targets[3, 2] = UNKNOWN
    parts = [task.count(output[:1], targets[:1]), task.count(output[1:], targets[1:])]
    found = task.finish({name: parts[0][name] + parts[1][name] for name in parts[0]})
    losses = [
        -output[b, t].log_softmax(0)[targets[b, t]].item()
        for b in range(5)
        for t in range(3)
        if targets[b, t] != NOT_COUNTED
    ]
    assert len(losses) == 7
    assert float(found["perplexity"]) == pytest.approx(math.exp(sum(losses) / 7))
    assert float(found["unknown"]) == pytest.approx((targets == UNKNOWN).sum().item() / 7)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_no_word_sees_those_behind_it(norm):
    torch.manual_seed(0)
    model = CausalTransformer(9, context=6, dim=8, depth=2, heads=2, mlp_dim=16, norm=norm).eval()
    words = torch.randint(9, (2, 6))
    other = words.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 9
    with torch.no_grad():
        one, two = model(words), model(other)
    torch.testing.assert_close(one[:, :4], two[:, :4])
    assert (one[:, 4:] - two[:, 4:]).abs().max() > 1e-3


def test_norms_stand_before_or_behind_the_branches():
    torch.manual_seed(0)
    words = torch.randint(9, (2, 6))
    streams = {}
    for norm in ("pre", "post"):
        model = CausalTransformer(9, context=6, dim=8, depth=3, heads=2, mlp_dim=16, norm=norm)
        model.blocks[1].register_forward_hook(lambda module, args, output, norm=norm: streams.update({norm: output}))
        model(words)
    # behind a norm every token has deviation 1; a sum of branches has not
    assert streams["post"].std(2, unbiased=False).sub(1).abs().max() < 1e-2
    assert streams["pre"].std(2, unbiased=False).sub(1).abs().min() > 1e-2


@pytest.mark.parametrize("study", [neutreno_lm.STUDY, sigma_lm.STUDY], ids=lambda study: study.name)
def test_the_study_runs_end_to_end_to_a_text_that_is_learned(tmp_path, text, study):
    changes = {
        "steps": 25,
        "vocabulary": 10,
        "dim": 16,
        "mlp_dim": 32,
        "depth": 2,
        "context": 8,
        "window_words": 40,
        "learning_rate": 0.01,
        "test_size": None,
    }
    small = study.model_copy(
        update={"task": study.task.model_copy(update=changes), "claims": (), "seeds": 1, "methods": study.methods[:1]}
    )
    found = carry(small, tmp_path)
    assert [run["status"] for run in found] == ["finished"] * 2
    for run in found:
        # of ten words; the dog is unknown
        assert 1 < run["metrics"]["test/perplexity"] < 9 and 1 < run["metrics"]["window/perplexity"] < 9
        assert run["metrics"]["test/unknown"] == pytest.approx(1 / 8, abs=0.02)


def test_a_diverged_run_counts_as_a_guess_among_all_words():
    (perplexity,) = [metric for metric in LanguageModel(vocabulary=7).all_metrics() if metric.name == "perplexity"]
    assert perplexity.failure == 7
