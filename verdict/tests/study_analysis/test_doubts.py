"""A baseline near chance, and one whose loss still falls, are named beside the verdict of any kind of study."""

from __future__ import annotations

import json

import pytest
from report.synthetic_study import write_study
from study_analysis.test_claims import study
from study_analysis.test_copies import table

from headwise_verdict.reporting.numbers import study_of_numbers
from headwise_verdict.reporting.rebuild import rebuild
from headwise_verdict.results.analysis import analyse, analyse_study
from headwise_verdict.results.table import print_table


def near(base, **more):
    arms = {"baseline": [base + one / 1000 for one in range(6)], "A()": [base + 0.1 + one / 900 for one in range(6)]}
    return [words for words in analyse_study(study(arms, **more)).warnings if "near chance" in words]


def test_a_baseline_near_the_chance_that_its_task_declares_is_told():
    (told,) = near(0.105, failure=0.1)
    assert "near chance: test accuracy 10.75 %, chance 10.00." in told
    assert near(0.08, failure=0.1) and not near(0.2, failure=0.1)


@pytest.mark.parametrize(
    ("values", "outcome", "told"),
    [
        ([0.501, 0.497, 0.503, 0.502, 0.499, 0.5], "accuracy:higher", "guessing among 2 classes"),
        ([10.1, 9.9, 10.2, 9.8, 10.05, 9.95], "acc:higher", "guessing among 10 classes"),
        ([0.501, 0.497, 0.503, 0.502, 0.499, 0.5], "auc:higher", "guessing among 2 classes"),
        ([0.501, 0.497, 0.503, 0.502, 0.499, 0.5], "f1:higher", ""),
        ([0.501, 0.497, 0.503, 0.502, 0.499, 0.5], "loss:lower", ""),
        ([0.801, 0.797, 0.803, 0.802, 0.799, 0.81], "accuracy:higher", ""),
    ],
)
def test_a_table_whose_accuracy_is_that_of_guessing_is_told(tmp_path, values, outcome, told, capsys):
    analysis = table(tmp_path, {"plain": values, "drop": [one * 1.1 for one in values]}, (outcome,))
    found = [words for words in analysis.warnings if "near chance" in words]
    assert told in found[0] if told else not found
    print_table(analysis)
    assert ("near chance" in capsys.readouterr().out) == bool(told)


def of_curves(folder, losses, name="test/loss"):
    """Let every run have this curve, moved a little by its seed."""
    made = write_study(folder, methods=("baseline", "A()"), effects=(0, 0.05), seeds=6, epochs=2)
    for run in made.glob("runs/*"):
        config = json.loads((run / "config.json").read_text())
        shift = config["seed"] / 977 + (config["arm"] != "baseline") / 613
        lines = [{"epoch": at, "step": at, "metrics": {name: one + shift}} for at, one in enumerate(losses, 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [words for words in analyse(made).warnings if "still improving" in words]


STRAIGHT = [2.0 - 0.1 * at for at in range(12)]
CONVERGED = [0.5 + 1.5 * 0.5**at for at in range(16)]


@pytest.mark.parametrize("name", ["test/loss", "train/loss", "validation/loss"])
def test_a_loss_that_falls_to_the_end_is_told(tmp_path, name):
    (told,) = of_curves(tmp_path / "study", STRAIGHT, name)
    words = name.replace("/", " ")
    assert f"the last quarter of its steps brought 30\u00a0% of the whole fall of its {words}." in told


@pytest.mark.parametrize("losses", [CONVERGED, STRAIGHT[:5], [1.0] * 12, [1, 2, 3, 4, 5, 6, 7], [*CONVERGED, 0.7, 0.8]])
def test_a_loss_that_has_fallen_or_has_too_few_points_is_not(tmp_path, losses):
    assert not of_curves(tmp_path / "study", losses)


def of_steps(folder, losses, column="train/loss"):
    """Return the warnings of a table with a row per step, whose runs have this loss, moved a little by each."""
    rows = [f"run,arm,seed,step,{column},accuracy"]
    for at, (arm, seed) in enumerate((arm, seed) for arm in ("plain", "drop") for seed in range(6)):
        rows += [
            f"r{at},{arm},{seed},{10 * step},{loss + at / 977},{0.8 + at / 991}" for step, loss in enumerate(losses)
        ]
    (folder / "steps.csv").write_text("\n".join(rows) + "\n")
    study_of_numbers(folder / "steps.csv", ("accuracy:higher",), "plain", folder / "out")
    return [words for words in analyse(folder / "out").warnings if "still improving" in words]


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("loss", "train loss"),
        ("train_loss", "train loss"),
        ("metrics.eval_loss", "validation loss"),
        ("val/loss", "validation loss"),
        ("test/loss", "test loss"),
    ],
)
def test_a_loss_that_falls_to_the_end_of_a_table_of_steps_is_told(tmp_path, column, name):
    (told,) = of_steps(tmp_path, STRAIGHT, column)
    assert told.startswith("plain is still improving") and f"of the whole fall of its {name}." in told


def test_a_loss_of_a_table_that_has_fallen_is_not_told_and_other_columns_are_no_losses(tmp_path):
    assert not of_steps(tmp_path, CONVERGED)
    assert not of_steps(tmp_path, STRAIGHT, "penalty")
    # the curves are those of the table that was read last
    assert of_steps(tmp_path, STRAIGHT) and not of_steps(tmp_path, CONVERGED)


def test_the_page_of_a_table_of_steps_draws_its_curves_over_steps(tmp_path):
    of_steps(tmp_path, STRAIGHT)
    page = rebuild(tmp_path / "out").read_text()
    assert "every step" in page and "every epoch" not in page and "still improving" in page
    assert (tmp_path / "out" / "epochs.csv").read_text().startswith("arm,")
