"""How far an arm's own parameters moved: an outcome of real runs, and the premise that names it."""

import json

import pytest
import torch
from small_studies import carry, orders, study_of, tiny_study
from test_core import CORE

from headwise import SigmaReparam
from headwise.lab.comparing.claim_check import canonical_premises
from headwise.lab.experiments.premises import parameters_moved
from headwise.lab.training.checkpoint import load_checkpoint
from headwise.lab.training.execution import execute
from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting.rebuild import rebuild
from headwise_verdict.results.claims import judged_premises
from headwise_verdict.results.folder import read_study
from headwise_verdict.results.records import ClaimTest, OutcomeNames, Premise

GAINS, SIGMA, IDLE = "FeatScale()", repr(SigmaReparam()), "DropHead(p=0.2)"
FASTER = "FeatScale() | method_rate=10.0"


def results(study, out):
    carry(study, out)
    found = [json.loads(path.read_text()) for path in sorted(out.glob("runs/*/result.json"))]
    return {result["arm"]: result["metrics"] for result in found}


def own(folder, mark):
    tensors = load_checkpoint(folder, pytest.fail).tensors
    return {k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.") and mark in k}


def test_what_methods_learned_moved_by_what_the_weights_on_disk_say(tmp_path):
    of = {
        order.configuration.arm: order for order in orders(tiny_study(methods=(GAINS, FASTER, IDLE, SIGMA)), tmp_path)
    }
    metrics = {arm: execute(order, lambda event: None).metrics for arm, order in of.items()}
    # gains that start at 0 have moved by what they are
    gains = torch.cat([t.flatten() for name, t in own(of[GAINS].folder, "_gain").items()])
    assert (
        metrics[GAINS][OutcomeNames.MOVED] == pytest.approx(float(gains.square().mean().sqrt()), rel=1e-6)
        and gains.any()
    )
    assert OutcomeNames.MOVED_RELATIVE not in metrics[GAINS]
    # of Adam, a step is about as large as the rate
    assert metrics[FASTER][OutcomeNames.MOVED] > 5 * metrics[GAINS][OutcomeNames.MOVED]
    assert 0 < metrics[SIGMA][OutcomeNames.MOVED_RELATIVE] < 1
    assert not any(name.startswith("methods/") for arm in ("baseline", IDLE) for name in metrics[arm])


def test_what_is_not_trained_has_not_moved(tmp_path):
    # the head alone learns
    frozen = study_of(f"{CORE}:Adapt", (SIGMA,), way="head", start="fresh")
    assert (
        results(frozen, tmp_path)[SIGMA] | {OutcomeNames.MOVED: 0.0, OutcomeNames.MOVED_RELATIVE: 0.0}
        == results(frozen, tmp_path)[SIGMA]
    )


@pytest.mark.grid
def test_over_phases_the_start_is_that_of_the_first_with_the_methods(tmp_path):
    # of the fresh second phase the start is another, which must count for nothing
    arm = SIGMA
    last = results(study_of(f"{CORE}:Adapt", (arm,), way="both"), tmp_path / "both")[arm][OutcomeNames.MOVED]
    first = results(study_of(f"{CORE}:Adapt", (arm,), way="off"), tmp_path / "off")[arm][OutcomeNames.MOVED]
    alone = results(study_of(f"{CORE}:Adapt", (arm,), way="on"), tmp_path / "on")[arm][OutcomeNames.MOVED]
    # methods that are gone in the last phase moved as far as they had come
    assert 0 < first < last < 0.05 and 0 < alone < 0.05


@pytest.mark.grid
@pytest.mark.parametrize(("by", "holds"), [(1e-4, True), (0.9, False)])
def test_the_premise_that_parameters_moved_is_judged_on_runs(tmp_path, by, holds):
    premise = parameters_moved(GAINS, by)
    study = tiny_study(methods=(GAINS, IDLE), seeds=6, epochs=1)
    study = study.model_copy(update={"premises": (premise, parameters_moved(IDLE))})
    carry(study, tmp_path)
    found, unknown = judged_premises(read_study(tmp_path))
    assert found.holds is holds and "change of own parameters of FeatScale()" in found.ours
    # an arm that learns nothing has no such figure, and nothing is said of it
    assert unknown.holds is None
    page = rebuild(tmp_path).read_text(encoding="utf-8")
    table = page.partition("own parameters of the methods")[2].partition("</table>")[0]
    assert "FeatScale(" in table and "DropHead(" not in table and "baseline" not in table
    # the baseline has no such figure, and so no difference is missing anywhere
    latex = (tmp_path / "table.tex").read_text(encoding="utf-8")
    assert "no pair of finished runs" not in page and "own parameters" not in latex


def test_a_premise_names_only_the_figures_that_are_recorded():
    test = ClaimTest(arm=GAINS, outcome="methods/move", says="higher", level=0.1)
    study = tiny_study(methods=(GAINS,)).model_copy(update={"premises": (Premise(name="moved", tests=(test,)),)})
    with pytest.raises(StudyError, match=r"no run records the outcome methods/move\. Did you mean 'methods/moved'"):
        canonical_premises(study)
