"""Shares are counts: single precision neither breaks ties of sign flips nor leaks into what is told."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from grids import part_of_grid
from headwise_papers.tasks.error_rates import finish_errors

from headwise.lab.experiments.evaluation import Evaluation
from headwise.lab.experiments.task import Task
from headwise.lab.training.evaluate import finished
from headwise_verdict.results.differences import paired_differences
from headwise_verdict.results.folder import RunFolder, StudyFolder, whole_of
from headwise_verdict.results.records import MetricRecord, RunResult, StudyRecord

COUNTS = {"baseline": [401, 395, 410, 399, 402, 390], "A()": [414, 408, 397, 412, 415, 403]}


def single(count: int, of: int) -> float:
    return float(np.float32(count) / np.float32(of))


def stored(counts: dict[str, list[int]], of: int, names=("test/accuracy",), quotient=single) -> StudyFolder:
    metrics = [MetricRecord(name="accuracy", label="accuracy", higher_is_better=True, unit="%")]
    seeds = list(range(len(counts["baseline"])))
    record = StudyRecord(arms=list(counts), baseline="baseline", seeds=seeds, primary=names[0], metrics=metrics)
    runs = {}
    for arm, every in counts.items():
        for seed, count in enumerate(every):
            found = {name: quotient(count, of) for name in names}
            result = RunResult(status="finished", arm=arm, seed=seed, hash="0", metrics=found, format=2)
            runs[arm, seed] = RunFolder(arm, seed, Path("run"), result)
    return StudyFolder(Path("study"), record, runs)


def p_of_counts(ours: list[int], base: list[int]) -> Fraction:
    """Count the sign flips by hand, in whole numbers."""
    differences = [one - other for one, other in zip(ours, base)]
    flips = list(product((1, -1), repeat=len(differences)))
    sums = [abs(sum(sign * d for sign, d in zip(signs, differences))) for signs in flips]
    return Fraction(sum(one >= abs(sum(differences)) for one in sums), len(flips))


def test_ties_of_sign_flips_are_those_of_the_counts():
    assert [one - other for one, other in zip(COUNTS["A()"], COUNTS["baseline"])] == [13, 13, -13, 13, 13, 13]
    found = paired_differences(stored(COUNTS, 1000), "test/accuracy", True)["A()"]
    assert found.p == p_of_counts(COUNTS["A()"], COUNTS["baseline"])
    assert found.by_seed["0"] == pytest.approx(0.013, abs=1e-16)


@pytest.mark.parametrize("of", [130, 2000, 5903, 10_000])
def test_random_counts_in_single_precision_give_the_p_of_whole_numbers(of):
    rng = np.random.default_rng(of)
    for _ in range(10):
        base = rng.integers(of // 3, of // 2, 7)
        counts = {"baseline": base.tolist(), "A()": (base + rng.integers(-5, 9, 7)).tolist()}
        found = paired_differences(stored(counts, of), "test/accuracy", True)["A()"]
        assert found.p == p_of_counts(counts["A()"], counts["baseline"])


def test_a_gap_of_shares_of_different_numbers_is_taken_from_both():
    study = stored(COUNTS, 1000, ("test/accuracy", "train/accuracy"))
    study.runs["A()", 0].result.metrics["train/accuracy"] = single(2999, 3000)
    study.runs["A()", 0].result.metrics["gap/accuracy"] = single(2999, 3000) - single(414, 1000)
    assert study.figure("A()", 0, "gap/accuracy") == 2999 / 3000 - 414 / 1000


@pytest.mark.parametrize("of", part_of_grid([7, 130, 5903, 9978], [130]))
def test_the_number_of_all_is_recovered(of):
    rng = np.random.default_rng(of)
    for quotient in (single, lambda count, of: count / of):
        values = [quotient(count, of) for count in rng.integers(1, of, 40)]
        assert of % whole_of(values).number == 0
        assert [whole_of(values).exact(value) for value in values] == [round(v * of) / of for v in values]


def test_figures_that_are_no_shares_stay_as_they_are():
    values = np.random.default_rng(0).random(12)
    assert whole_of(values.tolist()) is None
    # too few figures to tell a share by
    assert whole_of([float(np.float32(1234 / 5903))]) is None
    assert whole_of([0.0, 1.0]).number == 1


class Bare(Task):
    def model(self):
        return torch.nn.Identity()

    def data(self, split):
        return torch.zeros(1), torch.zeros(1)


def test_a_share_is_told_in_double_precision():
    sums = {name: torch.tensor(value) for name, value in (("letter_edits", 13), ("letters", 1000))}
    sums |= {"word_edits": torch.tensor(1), "words": torch.tensor(3)}

    class Letters(Bare):
        metric_name = "letter_error"

        def finish(self, sums):
            return {"letter_error": finish_errors(sums)["letter_error"]}

    assert finished(Letters(), Evaluation("test"), sums) == {"letter_error": 13 / 1000}


def test_the_mean_of_a_batch_loses_no_count():
    task, total = Bare(), {}
    for size, right in ((13, 7), (41, 13)):
        logits = torch.eye(2)[(torch.arange(size) < right).long()]
        for name, value in task.count(logits, torch.ones(size, dtype=torch.long)).items():
            total[name] = total.get(name, 0) + value.double()
    assert finished(task, Evaluation("test"), total)["accuracy"] == 20 / 54
