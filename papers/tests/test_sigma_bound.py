"""The study of the entropy floor: its minima, its growth with the width, and its verdicts, at a small size."""

import json
import math

import pytest
import torch
from headwise_papers import sigma_bound
from headwise_papers.findings import findings
from headwise_papers.sigma_bound import least_entropy, update_growth
from headwise_papers.sigma_bound.least_entropy import entropy, falls_as, least_entropies, rate

import headwise_verdict.reporting
from headwise_verdict.results.analysis_record import FindingsRecord


@pytest.fixture(scope="module")
def least():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least_entropy, "STARTS", 1)
        patch.setattr(least_entropy, "ITERATIONS", 40)
        return [least_entropies(0, 4, math.log(4) + beyond) for beyond in (4.0, 7.0)]


def test_the_entropy_is_that_of_the_softmax_also_where_it_is_tiny():
    logits = torch.tensor([3.0, 1.0, -2.0], dtype=torch.float64)
    p = logits.softmax(0)
    assert float(entropy(logits)) == pytest.approx(float(-(p * p.log()).sum()))
    assert float(entropy(torch.tensor([40.0, 0.0], dtype=torch.float64))) == pytest.approx(41 * math.exp(-40), rel=1e-9)


def test_the_floor_is_reached_over_logits_and_over_inputs_and_weights(least):
    for one in least:
        assert one.logits == pytest.approx(one.floor, rel=1e-6) and one.weights == pytest.approx(one.floor, rel=0.05)
        assert min(one.logits, one.weights) >= one.floor * (1 - 1e-9)


def test_the_least_entropy_falls_at_the_rate_of_the_theorem(least):
    assert falls_as(least, lambda one: one.logits) == pytest.approx(rate(4), rel=0.01)
    # a fall twice as fast is told from it
    assert falls_as(least, lambda one: math.exp(-2 * one.size)) == pytest.approx(2, rel=0.2)


def test_the_norm_is_the_largest_singular_value():
    torch.manual_seed(0)
    for shape in ((48, 48), (30, 70), (70, 30)):
        matrix = torch.randn(shape, dtype=torch.float64)
        assert update_growth._norm(matrix) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-12)


def test_with_enough_power_iterations_only_gamma_moves_the_norm():
    once, converged = (update_growth.moves(0, 64, iterations)[1] for iterations in (1, 64))
    # gamma moves by at most the learning rate in a step of Adam
    assert converged < update_growth.STEPS * update_growth.RATE * 1.01 < once


def test_an_exponent_is_that_of_a_power_law():
    assert update_growth.exponent({w: 3 * w**0.7 for w in (8, 16, 64)}) == pytest.approx(0.7)


def test_updates_of_a_plain_model_grow_with_the_width():
    narrow, wide = (update_growth.moves(0, width, 0) for width in (16, 64))
    assert 2 < wide[0] / narrow[0] < 8
    ours = update_growth.moves(0, 64, 1)
    assert ours[0] == pytest.approx(wide[0], rel=0.1)


@pytest.mark.parametrize(
    ("exponents", "update", "change"),
    [
        ([0.9, 0.95, 1.0], "as published", "contrary"),
        ([0.01, 0.03, 0.05], "contrary", "as published"),
        ([0.0, 0.1, 0.25], "undecided", "undecided"),
        # what falls with the width does not grow with it
        ([-0.4, -0.3, -0.2], "contrary", "as published"),
    ],
)
def test_verdicts_follow_the_intervals(exponents, update, change):
    models = [{"update": value, "change": value} for value in exponents * 3]
    assert judged(dict.fromkeys(sigma_bound.POWER_ITERATIONS, models))[2:] == [update, change, change]


def judged(figures, keys=()):
    claims = sigma_bound.claims(list(keys))
    found = findings("x", "X", "?", figures, claims, labels=sigma_bound.LABELS, settings={})
    return [claim["verdict"] for claim in found["claims"]]


def test_an_entropy_below_the_floor_would_be_seen():
    reached = {"least": 0.0, "most": 1e-6, "rate": 1.0}
    for least, verdict in ((0.0, "as published"), (-0.01, "contrary")):
        figures = {f"{t} keys": [reached | {"least": least}] * 10 for t in least_entropy.TOKENS}
        assert judged(figures, figures)[:2] == [verdict, "as published"]


def test_minima_do_not_depend_on_a_seed_and_figures_that_a_seed_should_move_do():
    reached = {"least": 0.0, "most": 0.00012345678, "rate": 1.0012345678}
    for repeated, verdict in (
        ([reached] * 10, "as published"),
        ([dict(reached) for _ in "0123456789"], "not testable here"),
    ):
        figures = {f"{t} keys": repeated for t in least_entropy.TOKENS}
        assert judged(figures, figures)[:2] == [verdict, verdict]


@pytest.mark.grid
def test_the_study_gives_findings_with_judged_claims_and_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(least_entropy, "TOKENS", (4,))
    monkeypatch.setattr(least_entropy, "BEYOND", (4.0, 7.0))
    monkeypatch.setattr(least_entropy, "STARTS", 1)
    monkeypatch.setattr(least_entropy, "ITERATIONS", 40)
    monkeypatch.setattr(sigma_bound, "REACHED", 0.05)
    monkeypatch.setattr(update_growth, "WIDTHS", (16, 32))
    found = sigma_bound.run(tmp_path, seeds=6)
    record = FindingsRecord.model_validate(json.loads(json.dumps(found)))
    assert [claim.verdict for claim in record.claims[:2]] == ["as published", "as published"]
    assert all(claim.source and claim.ours for claim in record.claims)
    assert [row[2] for row in record.tables[0].rows] == [6] * 9
    assert len(record.tables[1].rows) == 2
    (tmp_path / "findings.json").write_text(json.dumps(found))
    assert headwise_verdict.reporting.write(tmp_path).exists()
