"""Readings of a watched run as outcomes: of heads, of every matrix, of the loss's sharpness."""

import json

import pytest
import torch
from small_studies import all_numbers, carry, orders, tiny_study

from headwise.lab.comparing.claim_check import canonical_claims
from headwise.lab.experiments.task_source import load_task
from headwise.lab.training.execution import execute
from headwise.lab.training.heads import watched_outcomes
from headwise.lab.training.preflight import check_task
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.records import Claim, ClaimTest, Divergence

NAMES = ("attention_entropy", "matrix_norm", "sharpness", "sharpness_share")
SETTINGS = {"watch_statistics": NAMES, "watch_examples": 8, "watch_every": 2, "epochs": 1}


def read(folder):
    return [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]


def test_what_a_task_names_is_read_and_each_gives_three_outcomes(tmp_path):
    (order,) = orders(tiny_study(optimizer="sgd", **SETTINGS), tmp_path, watch=True)
    metrics = execute(order, lambda event: None).metrics
    records = [r for r in read(order.folder) if "alert" not in r]
    assert {r["statistic"] for r in records} == set(NAMES)
    for name in NAMES:
        by_step = {}
        for record in records:
            if record["statistic"] == name:
                by_step.setdefault(record["step"], []).append(record["value"])
        means = [sum(values) / len(values) for _, values in sorted(by_step.items())]
        assert len(means) > 1
        wanted = {"least": min(means), "greatest": max(means), "last": means[-1]}
        for kind, value in wanted.items():
            assert metrics[f"watched/{name}/{kind}"] == pytest.approx(value)
    assert len({r["site"] for r in records if r["statistic"] == "matrix_norm"}) > 4


def test_the_sharpness_read_in_a_run_is_that_of_its_weights_and_training_loss(tmp_path):
    import headwise

    study = tiny_study(methods=("Decorrelation(strength=500.0)",), **SETTINGS)
    of = {order.configuration.arm: order for order in orders(study, tmp_path, watch=True)}
    first = {}
    for arm, order in of.items():
        execute(order, lambda event: None)
        first[arm] = next(r["value"] for r in read(order.folder) if r["statistic"] == "sharpness")
    from headwise.lab.experiments.configuration import derive
    from headwise.lab.training.splits import training_examples

    order = of["baseline"]
    torch.manual_seed(derive(order.configuration.draws, "weights"))
    model = study.task.model()
    (x, y), _ = training_examples(study.task, order.configuration, "train")
    torch.manual_seed(0)
    exact = headwise.sharpness(lambda: study.task.loss(model(x[:8]), y[:8]), model)
    assert first["baseline"] == pytest.approx(exact.value, rel=1e-3)
    # the penalty belongs to what is trained
    assert first["Decorrelation(strength=500.0)"] > first["baseline"] * 1.01


def test_reading_them_leaves_the_numbers_of_the_run(tmp_path):
    found = []
    for names in ((), NAMES):
        study = tiny_study(methods=("DropHead(p=0.3)",), **SETTINGS | {"watch_statistics": names})
        carry(study, tmp_path / str(len(names)), watch=bool(names))
        runs = all_numbers(tmp_path / str(len(names))).values()
        assert all(any("watched/" in k for k in r["metrics"]) == bool(names) for _, r in runs)
        plain = [
            {k: v for k, v in r["metrics"].items() if "/" in k and k[:6] not in ("watche", "alerts")} for _, r in runs
        ]
        found.append([(metrics, [line["metrics"] for line in lines]) for metrics, (lines, _) in zip(plain, runs)])
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))


def test_a_diverged_run_counts_its_readings_up_to_the_divergence(tmp_path):
    values = [(0, 3.0), (2, 1.0), (4, None), (6, 9.0), (8, 50.0)]
    lines = [{"statistic": "sharpness", "step": step, "value": value} for step, value in values]
    (tmp_path / "health.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = load_task(tiny_study().task_place)(watch_statistics=("sharpness", "max_logit"))
    found = watched_outcomes(tmp_path / "health.jsonl", task, Divergence(step=7))
    assert found == {"watched/sharpness/least": 1.0, "watched/sharpness/greatest": 9.0, "watched/sharpness/last": 9.0}


def test_the_norm_of_every_matrix_at_the_end_is_an_outcome(tmp_path):
    (order,) = orders(tiny_study(head_statistics=("matrix_norm",), epochs=1), tmp_path)
    metrics = execute(order, lambda event: None).metrics
    found = {k.removeprefix("heads/matrix_norm/"): v for k, v in metrics.items() if k.startswith("heads/matrix_norm/")}
    mean, worst = found.pop("mean"), found.pop("worst")
    assert worst == max(found.values()) and mean == pytest.approx(sum(found.values()) / len(found))
    assert any(name.endswith(" q") for name in found) and any("mlp" in name for name in found)


def test_names_that_no_watch_reads_are_refused_before_training():
    kind = load_task(tiny_study().task_place)
    with pytest.raises(
        StudyError, match=r"Tiny.watch_statistics: There is no statistic 'sharpnes'. Did you mean 'sharpness'"
    ):
        check_task(kind(watch_statistics=("sharpnes",)))
    with pytest.raises(StudyError, match=r"Tiny.head_statistics: There is no statistic 'sharpness'"):
        check_task(kind(head_statistics=("sharpness",)))
    check_task(kind(watch_statistics=NAMES, head_statistics=("matrix_norm",)))


def test_a_claim_on_what_is_not_read_is_refused():
    def study(outcome, watch=True):
        claim = Claim(text="?", tests=(ClaimTest(arm="DropHead(p=0.3)", outcome=outcome, says="lower"),))
        made = tiny_study(methods=("DropHead(p=0.3)",), watch_statistics=("sharpness",))
        return made.model_copy(update={"claims": (claim,), "watch": watch})

    assert canonical_claims(study("watched/sharpness/last"))
    with pytest.raises(StudyError, match="no run records the outcome watched/sharpness/first"):
        canonical_claims(study("watched/sharpness/first"))
    with pytest.raises(StudyError, match="only watched runs have the outcome"):
        canonical_claims(study("watched/sharpness/last", watch=False))
