"""A claim that a study cannot test is refused before anything trains; the scale of a run is told."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from study.small_studies import carry, tiny_study

from headwise.lab.comparing.choosing import choose_study
from headwise.lab.comparing.request import Request
from headwise.lab.experiments.study import Scale
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.records import Claim, ClaimTest, Premise

ARM = "DropHead(p=0.2)"
SWEEP = "DropHead(p={0.1,0.2,0.3})"
SCALES = {"small": Scale(settings={}, seeds=2), "paper": Scale(settings={"epochs": 2}, seeds=1)}


def request(study, **asked):
    given = SimpleNamespace(STUDY=study)
    return Request(
        study="tiny", studies=SimpleNamespace(names=("tiny",), load=lambda name: given), device="cpu", **asked
    )


def claimed(sweeps=(), margin=None, **test):
    test = {"arm": ARM, "outcome": "test/accuracy", "says": "higher"} | test
    claim = Claim(text="It helps.", tests=(ClaimTest(**test),))
    update = {"claims": (claim,), "sweeps": sweeps, "scales": SCALES, "margin": margin}
    return tiny_study(methods=(ARM,)).model_copy(update=update)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            {"arm": "DropHead(p=0.4)"},
            r"It helps.*tiny: it has no arm DropHead\(p=0\.4\)\. Did you mean 'DropHead\(p=0\..\)'",
        ),
        ({"arm": "DropHed(p=0.2)"}, "Did you mean 'DropHead'"),
        ({"against": "same"}, "it has no arm same"),
        ({"outcome": "test/acuracy"}, "no run records the outcome test/acuracy. Did you mean 'test/accuracy'"),
        ({"outcome": "fog/accuracy"}, "no run records the outcome fog/accuracy"),
        ({"outcome": "cost/second_per_step"}, "Did you mean 'cost/seconds_per_step'"),
        ({"outcome": "heads/token_cosine/worst"}, "no run records the outcome heads/token_cosine"),
        ({"outcome": "alerts/entropy_collapse/step"}, "Set watch=True"),
        ({"level": 0.6, "scale": "papr"}, "judged at the scale 'papr' alone, which the study does not have"),
        ({"against_outcome": "heads/token_cosine/layer 0"}, "no run records the outcome heads/token_cosine"),
        ({"outcome": "rates/imbalance_vo/rate"}, "Set watch=True"),
        ({"says": "same"}, "without a margin"),
        ({"says": "same", "outcome": "test/loss", "margin": None}, "without a margin"),
        (
            {"says": "rises", "arm": "DropHead(p={0.1,0.2})"},
            r"no axis DropHead\(p=\{0\.1,0\.2\}\)\. Its axes: DropHead",
        ),
    ],
)
def test_what_the_study_does_not_have_is_refused_by_name(test, message):
    with pytest.raises(StudyError, match=message):
        choose_study(request(claimed(sweeps=(SWEEP,), **test)))


def test_an_axis_of_two_values_has_no_inside():
    with pytest.raises(StudyError, match="2 values, and a best value inside needs 3"):
        choose_study(request(claimed(sweeps=("DropHead(p={0.1,0.3})",), arm="DropHead(p={0.1,0.3})", says="inside")))


@pytest.mark.parametrize(
    "name", ["test/loss", "train/accuracy", "gap/loss", "validation/accuracy", "cost/parameters", "diverged"]
)
def test_outcomes_that_runs_record_are_taken(name):
    assert choose_study(request(claimed(outcome=name))).claims


def test_arms_and_axes_are_written_in_their_one_form():
    found = choose_study(request(claimed(sweeps=(SWEEP,), arm="DropHead( p = 0.2 )")))
    assert found.claims[0].tests[0].arm == ARM
    found = choose_study(request(claimed(sweeps=(SWEEP,), arm="DropHead(p={0.3, 0.1, 0.2})", says="falls")))
    assert found.claims[0].tests[0].arm == SWEEP


def test_other_arms_on_the_command_line_leave_a_claim_untold(tmp_path):
    study = choose_study(request(claimed(), methods=("DropColumn(p=0.1)",), seeds=1))
    carry(study, tmp_path)
    from headwise_verdict.results.analysis import analyse

    (claim,) = analyse(tmp_path).claims
    assert (claim.verdict, claim.why) == ("not testable here", f"the arm {ARM} was not run")


@pytest.mark.parametrize(
    ("asked", "scale"),
    [
        ({}, "small"),
        ({"scale": "paper"}, "paper"),
        ({"settings": ("epochs=2",)}, "paper"),
        ({"scale": "paper", "settings": ("batch_size=3",)}, "other"),
    ],
)
def test_the_scale_is_the_one_whose_settings_the_study_has(asked, scale):
    assert choose_study(request(claimed(), **asked)).scale == scale


def test_a_study_without_scales_is_at_its_default_or_another(tmp_path):
    assert choose_study(request(tiny_study())).scale == "default"
    study = choose_study(request(tiny_study(), settings=("batch_size=3",)))
    carry(study, tmp_path)
    assert json.loads((tmp_path / "study.json").read_text())["scale"] == "other"


@pytest.mark.parametrize(
    ("needs", "tests", "message"),
    [
        (("learnt",), (), "it needs the premise 'learnt', which the study does not state. Did you mean 'learned'"),
        (
            None,
            (ClaimTest(arm="same", outcome="test/accuracy", says="higher"),),
            "the premise 'learned' of tiny: it has no arm same",
        ),
    ],
)
def test_a_premise_that_cannot_be_tested_is_refused_by_name(needs, tests, message):
    study = claimed()
    claims = (study.claims[0].model_copy(update={"needs": needs}),)
    update = {"premises": (Premise(name="learned", tests=tests),), "claims": claims}
    with pytest.raises(StudyError, match=message):
        choose_study(request(study.model_copy(update=update)))


def test_a_margin_within_which_a_published_effect_counts_as_none_is_refused():
    study = claimed(effect=0.01)
    same = Claim(text="Alike.", tests=(ClaimTest(arm=ARM, outcome="test/accuracy", says="same", margin=0.02),))
    with pytest.raises(
        StudyError, match=r"margin 0\.02 of .* in test/accuracy exceeds the published effect 0\.01.*margin of 0\.005"
    ):
        choose_study(request(study.model_copy(update={"claims": (*study.claims, same)})))
