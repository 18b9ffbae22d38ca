"""The studies of weight decay and low rank: their tasks are what they say, and each runs end to end at its least size
to a checked number."""

from __future__ import annotations

import importlib
import json
import math
import struct

import numpy as np
import pytest
import torch
from headwise_papers.data import stories260k
from headwise_papers.tasks.character_lm import CHARACTERS, CharacterLM
from headwise_papers.tasks.recall import KEYS, VALUES, AssociativeRecall
from small_studies import carry

from headwise.lab.comparing.claim_check import canonical_claims
from headwise.lab.experiments.study import read_sweep
from headwise.lab.training.heads import head_rates, straight_line
from headwise.study import StudyError
from headwise_verdict.reporting import write

STUDIES = ("decay_recall", "decay_lm", "decay_vit", "decay_compress")
LM = {
    "dim": 16,
    "heads": 2,
    "depth": 1,
    "context": 16,
    "steps": 15,
    "batch_size": 8,
    "warmup": 0,
    "test_size": 20,
    "learning_rate": 0.02,
}


def study_of(name):
    return importlib.import_module(f"headwise_papers.{name}").STUDY


def smaller(name, arms, **settings):
    """Return a study at two seeds, with an axis of fewer arms."""
    study = study_of(name)
    task = type(study.task)(**study.task.model_dump() | settings)
    return study.model_copy(update={"task": task, "seeds": 2, "sweeps": arms, "claims": (), "scales": {}})


def located(study, folder):
    return study.model_copy(update={"task": study.task.located(folder)})


def metrics_of(results, arm):
    return [result["metrics"] for result in results if result["arm"] == arm]


@pytest.mark.parametrize("name", STUDIES)
def test_claims_arms_and_scales_exist(name):
    study = study_of(name)
    canonical_claims(study)
    assert study.seeds == study.scales["small"].seeds >= 8
    for scale in study.scales.values():
        type(study.task)(**study.task.model_dump() | scale.settings)
    assert all("baseline" in axis.arms for axis in study.axes)


def test_an_axis_takes_the_baseline_where_its_value_is_the_baselines_own():
    task = AssociativeRecall(attention_weight_decay=0.1)
    axis, _ = read_sweep("baseline | attention_weight_decay={0,0.1,1}", task)
    assert axis.arms[1] == "baseline" and axis.arms[0] == "baseline | attention_weight_decay=0.0"
    other, _ = read_sweep("DropHead(p={0.1,0.2})", task)
    assert "baseline" not in other.arms


def test_recall_asks_for_values_that_were_told():
    task = AssociativeRecall(pairs=5, queries=3, random_labels=0.0)
    tokens, targets = task.data("train")
    assert tokens.shape[1] == 13 and targets.shape[1] == 3 and task.data("validation") is None
    for row, wanted in zip(tokens[:20].tolist(), targets[:20].tolist(), strict=True):
        told = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(told) == 5 and all(key < KEYS <= value < KEYS + VALUES for key, value in told.items())
        assert [told[key] - KEYS for key in row[10:]] == wanted and len(set(row[10:])) == 3
    assert not torch.equal(tokens[:1000], task.data("test")[0])
    noisy = AssociativeRecall(pairs=5, queries=3, random_labels=0.5)
    # a random label is right once in 16 times
    assert float((noisy.data("train")[1] != targets).float().mean()) == pytest.approx(0.5 * 15 / 16, abs=0.01)
    assert torch.equal(noisy.data("test")[1], task.data("test")[1])
    with pytest.raises(ValueError, match="6 queries need as many pairs, got 5"):
        AssociativeRecall(pairs=5, queries=6).data("train")


def test_the_recall_model_sees_no_later_token():
    torch.manual_seed(0)
    model = AssociativeRecall(pairs=3, queries=2, dim=16).model().eval()
    tokens = torch.randint(KEYS, (4, 8))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % KEYS
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, 0], after[:, 0]) and not torch.equal(before[:, 1], after[:, 1])


@pytest.mark.grid
def test_decay_recall_runs_and_fits_the_course_of_the_balance(tmp_path):
    study = smaller(
        "decay_recall",
        ("baseline | attention_weight_decay={0.1,1}",),
        pairs=4,
        queries=4,
        dim=16,
        steps=40,
        train_size=640,
        test_size=50,
        watch_every=4,
        learning_rate=2e-2,
        warmup=0,
    )
    results = carry(study, tmp_path, watch=True)
    base, strong = (metrics_of(results, arm) for arm in study.axes[0].arms)
    for weak, much in zip(base, strong, strict=True):
        assert much["heads/nuclear_gap_vo/mean"] < weak["heads/nuclear_gap_vo/mean"]
        assert much["rates/nuclear_gap_vo/rate"] < weak["rates/nuclear_gap_vo/rate"] < 0
    run = next(path.parent for path in tmp_path.glob("runs/*/result.json"))
    found = json.loads((run / "result.json").read_text())["metrics"]
    lines = [json.loads(line) for line in (run / "health.jsonl").read_text().splitlines()]
    assert {line["statistic"] for line in lines if "alert" not in line} == set(study.task.watch_statistics)
    steps = sorted({line["step"] for line in lines})
    means = [
        np.mean([line["value"] for line in lines if line["statistic"] == "imbalance_vo" and line["step"] == step])
        for step in steps
    ]
    slope = np.polyfit(steps, np.log(means), 1)[0]
    assert found["rates/imbalance_vo/rate"] == pytest.approx(1000 * slope, rel=1e-6)
    assert found["rates/imbalance_vo/fit"] == pytest.approx(np.corrcoef(steps, np.log(means))[0, 1] ** 2, rel=1e-6)
    page = write(tmp_path).read_text(encoding="utf-8")
    assert "exponential rate of imbalance vo, e-folds per 1,000 steps" in page and "pseudo rank vo mean" in page


def test_an_exponential_course_has_its_own_rate_and_fits(tmp_path):
    stream = tmp_path / "health.jsonl"
    lines = [
        {"step": step, "statistic": "imbalance_vo", "head": head, "value": (1 + head) * math.exp(-0.02 * step)}
        for step in range(0, 50, 10)
        for head in (0, 1)
    ]
    lines += [{"step": 50, "statistic": "imbalance_vo", "head": 0, "value": 0.0}]
    lines += [{"step": 0, "statistic": "other", "head": 0, "value": 1.0}]
    # one that is no number
    lines += [{"step": 60, "statistic": "imbalance_vo", "head": 0, "value": None}]
    stream.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = head_rates(stream, ("imbalance_vo", "nuclear_gap_vo"))
    assert found == pytest.approx({"rates/imbalance_vo/rate": -20.0, "rates/imbalance_vo/fit": 1.0})
    assert straight_line([(0, 1.0), (1, 1.0), (2, 1.0)]) == (0.0, 1.0)


def test_rates_of_what_is_not_read_are_refused_before_training():
    from headwise.lab.training.preflight import check_task

    with pytest.raises(StudyError, match="head_rates names 'imbalance_vo', which watch_statistics leaves out"):
        check_task(AssociativeRecall(watch_statistics=("pseudo_rank_vo",), head_rates=("imbalance_vo",)))
    with pytest.raises(StudyError, match=r"watch_statistics: .*imbalanse_vo"):
        check_task(AssociativeRecall(watch_statistics=("imbalanse_vo",)))


def test_the_text_is_split_in_its_order_and_targets_follow(text):
    task = CharacterLM(context=16).located(text)
    parts = {split: task.data(split) for split in ("train", "validation", "test")}
    for inputs, targets in parts.values():
        assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.max() < CHARACTERS
    assert [len(inputs) for inputs, _ in parts.values()] == [599, 74, 74]
    (text / "tinyshakespeare" / "input.txt").write_text("abc" * 100)
    with pytest.raises(StudyError, match="3 different characters, tiny Shakespeare has 65"):
        task.data("train")


def test_decay_lm_runs_to_perplexities_of_its_losses(tmp_path, text):
    study = located(smaller("decay_lm", ("baseline | mlp_weight_decay={0.1,3}",), **LM), text)
    results = carry(study, tmp_path / "out", data=text)
    assert len(results) == 4
    for result in results:
        found = result["metrics"]
        assert found["test/perplexity"] == pytest.approx(math.exp(found["test/loss"])) and found["test/perplexity"] < 60
        assert 0 < found["heads/pseudo_rank_vo/mean"] <= 1
    base, other = (metrics_of(results, arm) for arm in study.axes[0].arms)
    assert all(one["test/loss"] != two["test/loss"] for one, two in zip(base, other, strict=True))


def test_decay_compress_loses_nothing_at_energy_1_and_keeps_less_at_less(tmp_path, text):
    study = located(smaller("decay_compress", (), energies=(0.5, 0.9, 1.0), **LM), text)
    for result in carry(study, tmp_path / "out", data=text):
        found = result["metrics"]
        assert found["cut at 1/lost"] == pytest.approx(0.0, abs=1e-6)
        assert found["cut at 0.5/lost"] == pytest.approx(found["cut at 0.5/loss"] - found["test/loss"], abs=1e-6)
        shares = [found[f"cut at {energy}/projections"] for energy in (0.5, 0.9, 1)]
        assert shares == sorted(shares) and shares[0] < 0.7 and shares[2] <= 1
        assert found["cut at 0.5/time"] > 0 and found["cut at 0.5/parameters"] > found["cut at 0.5/projections"]


def llama2c(width=8, layers=2, heads=4, groups=2, vocabulary=5):
    """Return a file of llama2.c whose numbers count up, and its attention weights by definition."""
    size, at, found = width // heads, 0, []
    shapes = [(vocabulary, width), (layers, width), (layers, width, width), (layers, groups * size, width)]
    shapes += [(layers, groups * size, width), (layers, width, width), (3,)]
    numbers = torch.arange(sum(math.prod(shape) for shape in shapes), dtype=torch.float32)
    for shape in shapes:
        found.append(numbers[at : at + math.prod(shape)].view(shape))
        at += math.prod(shape)
    head = struct.pack("7i", width, 16, layers, heads, groups, vocabulary, 32)
    return head + numbers.numpy().tobytes(), found[2:6]


def test_stories_are_read_as_llama2c_lays_them_out(tmp_path):
    content, (q, k, v, o) = llama2c()
    folder = tmp_path / "stories260K"
    folder.mkdir()
    path = folder / "stories260K.bin"
    path.write_bytes(content)
    for layer, one in enumerate(stories260k.read(tmp_path)):
        assert torch.equal(one.q[3], q[layer][6:8]) and torch.equal(one.k[1], k[layer][2:4])
        assert torch.equal(one.v[0], v[layer][:2]) and torch.equal(one.o[2], o[layer][:, 4:6].T)
    for broken, said in (
        (content[:200], "fewer than its header states"),
        (b"x", "1 bytes: it is not a llama2.c model"),
    ):
        path.write_bytes(broken)
        with pytest.raises(StudyError, match=said):
            stories260k.read(tmp_path)
    path.unlink()
    with pytest.raises(StudyError, match=r"is missing\. Name its folder by --data"):
        stories260k.read(tmp_path)


def test_decay_pretrained_finds_the_norms_of_the_weights_and_judges_no_claim(tmp_path, monkeypatch):
    from headwise_papers import decay_pretrained
    from headwise_papers.decay_pretrained.models import rotated

    from headwise.health.statistics.weights.product import Product
    from headwise_verdict.results.stored import checked_findings

    torch.manual_seed(0)
    rows = torch.randn(2, 4, 24)
    # balanced: the same rows on both sides
    products = {"stories260K": [Product("vo", rows, rows)], "all-MiniLM-L6-v2": [Product("vo", rows, 3 * rows)]}
    monkeypatch.setattr(decay_pretrained, "load", lambda model, data, say: products[model])
    found = decay_pretrained.run(tmp_path, seeds=6)
    apart = {row[0]: row[3] for row in found["tables"][0]["rows"] if row[1].startswith("mean difference, share")}
    # |1 − 3| over their mean, and (1 + 9)/2 against 3
    assert [float(f"{float(value):.3g}") for value in apart.values()] == [pytest.approx(0, abs=1e-6)] * 2 + [1.0, 0.5]
    turned = rotated(products["stories260K"][0], 0, 0)
    torch.testing.assert_close(turned.shared_gram.diagonal(dim1=1, dim2=2).sum(1), rows.square().sum((1, 2)))
    assert not torch.allclose(turned.spectrum, products["stories260K"][0].spectrum)
    (tmp_path / "findings.json").write_text(json.dumps(found))
    assert not checked_findings(tmp_path / "findings.json").claims and "decay-vit" in found["paragraphs"][-1]


def test_decoupled_decay_moves_each_group_by_its_own_decay(tmp_path, text):
    study = study_of("decay_decoupled")
    canonical_claims(study)
    assert study.scales["small"].seeds == 10 and len(study.arms) == 6
    task = type(study.task)(**study.task.model_dump() | LM | {"depth": 4, "steps": 25, "batch_size": 4})
    arms = (
        "baseline | attention_weight_decay=20.0, mlp_weight_decay=20.0",
        "baseline | attention_weight_decay=0.0, mlp_weight_decay=20.0",
    )
    small = study.model_copy(update={"task": task, "methods": arms, "seeds": 1, "claims": (), "scales": {}})
    results = carry(located(small, text), tmp_path / "out", data=text)
    (both,), (apart,) = (metrics_of(results, arm) for arm in arms)
    claimed = {test.outcome for claim in study.claims for test in claim.tests}
    assert claimed <= both.keys()
    assert both["heads/nuclear_gap_vo/mean"] < 0.5 * apart["heads/nuclear_gap_vo/mean"]
