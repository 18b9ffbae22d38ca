"""Answers after each word of a sentence: the figures are those of their definitions, and both kinds of reading see no
later word."""

from __future__ import annotations

import itertools

import pytest
import torch
from headwise_papers.data import sst2
from headwise_papers.neutreno_prefixes import STUDY
from headwise_papers.tasks.prefixes import Prefixes, _by_prefix, incremental_figures
from small_studies import carry

from headwise.lab.comparing.claim_check import canonical_claims

TINY = {
    "depth": 2,
    "dim": 16,
    "heads": 2,
    "head_dim": 8,
    "mlp_dim": 16,
    "vocabulary": 6,
    "longest": 8,
    "train_size": 24,
}


@pytest.fixture
def sentences(tmp_path):
    """SST-2's files, whose sentiment is one word, after up to two others."""
    (tmp_path / "data" / sst2.SOURCE.folder).mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv", "test-labeled.tsv"):
        rows = "".join(f"{'so ' * (at % 3)}{('bad', 'good')[at % 2]} film\t{at % 2}\n" for at in range(24))
        (tmp_path / "data" / sst2.SOURCE.folder / name).write_text("sentence\tlabel\n" + rows)
    return tmp_path / "data"


def naive(answers, label):
    """Return the figures of one sentence's list of answers, by their definitions."""
    final = answers[-1]
    edits = 1 + sum(one != other for one, other in itertools.pairwise(answers))
    first = next(at for at, one in enumerate(answers) if one == final)
    decided = next(at for at in range(len(answers)) if all(one == final for one in answers[at:]))
    return {
        "prefix_accuracy": sum(one == label for one in answers) / len(answers),
        "edit_overhead": (edits - 1) / edits,
        "correction_time": (decided - first) / len(answers),
        "relative_correctness": sum(one == final for one in answers) / len(answers),
    }


def test_the_figures_of_prefixes_are_those_of_their_definitions():
    generator = torch.Generator().manual_seed(0)
    answers, words = torch.randint(2, (40, 9), generator=generator), torch.randint(1, 10, (40,), generator=generator)
    labels = torch.randint(2, (40,), generator=generator)
    found = incremental_figures(answers, words, labels)
    for at in range(40):
        wanted = naive(answers[at, : words[at]].tolist(), int(labels[at]))
        assert {name: float(values[at]) for name, values in found.items()} == pytest.approx(wanted)
    # 0 1 0 0: three edits of which one is necessary; 0 is there at once and decided at the third of four
    assert naive([0, 1, 0, 0], 0) == {
        "prefix_accuracy": 0.75,
        "edit_overhead": 2 / 3,
        "correction_time": 0.5,
        "relative_correctness": 0.75,
    }


@pytest.mark.parametrize("reading", ["restart", "causal"])
def test_an_answer_hangs_on_no_later_word(reading, sentences):
    torch.manual_seed(0)
    task = Prefixes(**TINY, reading=reading).located(sentences)
    model = task.model().eval()
    batch = task.batch({name: part[:6] for name, part in task.data("test").items()}, None)
    answers = _by_prefix(model, batch.inputs)
    for row, last in enumerate(batch.targets["last"].tolist()):
        for many in range(1, last + 1):
            one = {name: part[row : row + 1, : many + 1] for name, part in batch.inputs.items()}
            alone = task.batch({"words": one["words"], "real": one["words"] > 0, "labels": torch.zeros(1).long()}, None)
            logits = model(**alone.inputs)
            whole = logits if logits.dim() == 2 else logits[:, -1]
            assert int(whole.argmax(-1)) == int(answers[row, many - 1])


def test_the_study_learns_the_word_that_tells_and_decides_when_it_comes(tmp_path, sentences):
    canonical_claims(STUDY)
    settings = TINY | {"batch_size": 8, "epochs": 14, "learning_rate": 0.02}
    task = Prefixes(**STUDY.task.model_dump() | settings).located(sentences)
    update = {"task": task, "methods": STUDY.methods[-1:], "seeds": 1, "claims": (), "premises": ()}
    results = carry(STUDY.model_copy(update=update), tmp_path / "out", data=sentences)
    assert len(results) == 2
    for result in results:
        metrics = result["metrics"]
        assert metrics["test/accuracy"] == metrics["prefixes/accuracy"] == 1.0
        # the last of two, three or four words is right; of sentences answered right the final answer is the right one
        assert (1 / 2 + 1 / 3 + 1 / 4) / 3 - 1e-6 <= metrics["prefixes/prefix_accuracy"] <= 1
        assert metrics["prefixes/relative_correctness"] == pytest.approx(metrics["prefixes/prefix_accuracy"])
