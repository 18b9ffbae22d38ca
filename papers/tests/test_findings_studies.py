"""The two findings studies: their laws at a small size, their findings, and the report made of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from headwise_papers import low_rank_toy, oversmoothing_at_init
from headwise_papers.low_rank_toy.adam_paths import regularized_optimum, two_scalars
from headwise_papers.low_rank_toy.gradient_flow import SINGULAR_VALUES, flow, problem

import headwise_verdict.reporting


@pytest.fixture(scope="module")
def half():
    return flow(0, 0.5)


def test_l2_on_the_factors_ends_at_the_soft_threshold(half):
    assert half["end"] == pytest.approx([2.5, 1.5, 0.9, 0.3, 0.0, 0.0], abs=1e-6)
    assert half["nuclear"] == pytest.approx(half["end"], abs=1e-6)


def test_the_balance_follows_its_law_and_the_gap_its_bound(half):
    assert half["law_error"] < 1e-4
    assert 0 < half["bound_used"] <= 1
    assert half["course"][0]["gap"] > 0.1
    assert abs(half["course"][-1]["gap"]) < 1e-9


def test_the_problem_has_the_singular_values_it_claims():
    target, a, b = problem(3)
    assert np.linalg.svd(target, compute_uv=False)[:6] == pytest.approx(SINGULAR_VALUES)
    assert np.linalg.norm(a.T @ a - b.T @ b) > 1


def test_adamw_with_a_large_epsilon_ends_at_l2_of_strength_epsilon_times_decay():
    found = two_scalars(100.0, factorised=False)
    solution = np.linalg.solve(np.array([[1.3, 0.3], [0.3, 1.3]]), np.array([1.06, 0.5]))
    assert found["solution"] == pytest.approx(solution)
    assert found["Adam + L2"]["end"] == pytest.approx(solution, abs=1e-6)
    assert 1e-5 < found["distance"] < 2e-3
    assert found["residual"] < 1e-6


@pytest.mark.grid
def test_l2_on_two_factors_is_l1_on_their_product():
    w = regularized_optimum(0.3, factorised=True)
    assert w == pytest.approx([0.76, 0.0])
    assert two_scalars(100.0, factorised=True)["Adam + L2"]["end"] == pytest.approx(w, abs=1e-4)


def test_a_missing_factor_of_two_would_be_seen():
    assert flow(0, 0.5, loss_factor=2.0)["end"] == pytest.approx([2.75, 1.75, 1.15, 0.55, 0.15, 0.0], abs=1e-5)


def test_token_cosine_agrees_with_its_definition():
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    gram = unit @ unit.transpose(1, 2)
    wanted = (gram.sum((1, 2)) - 7) / 42
    assert oversmoothing_at_init.token_cosine(x) == pytest.approx(float(wanted.mean()))
    assert oversmoothing_at_init.token_cosine(torch.ones(1, 4, 3)) == pytest.approx(1)
    assert oversmoothing_at_init.high_frequency(torch.ones(1, 4, 3)) == pytest.approx(0)


@pytest.fixture(scope="module")
def smoothing(tmp_path_factory):
    state = torch.get_rng_state()
    findings = oversmoothing_at_init.run(tmp_path_factory.mktemp("out"), seeds=2, jobs=1, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    return findings


@pytest.mark.grid
def test_neutreno_keeps_tokens_apart_at_initialisation(smoothing):
    rows = [row for row in smoothing["tables"][0]["rows"] if row[1] == "final token cosine"]
    final = {row[0]: float(row[3].partition(" ")[0]) for row in rows}
    assert smoothing["claims"][0]["verdict"] == "undecided"  # of two models
    assert 0.40 < final["baseline"] < 0.60
    assert 0.15 < final["NeuTRENO(strength=0.6)"] < 0.30
    assert final["FeatScale()"] == final["baseline"]
    assert final["FeatScale(), rest_gain = 1"] < final["baseline"]
    assert "in 2 of 2 models" in smoothing["paragraphs"][1]


def test_findings_become_a_report(smoothing, tmp_path):
    (tmp_path / "findings.json").write_text(json.dumps(smoothing, allow_nan=False), encoding="utf-8")
    html = headwise_verdict.reporting.write(tmp_path).read_text(encoding="utf-8")
    assert html.count('data-chart="vega-lite"') == 2
    assert smoothing["paragraphs"][0] in html


def test_the_toy_gives_findings_that_json_can_hold(tmp_path, monkeypatch):
    import headwise_papers.low_rank_toy.adam_paths as scalars

    monkeypatch.setattr(scalars, "ADAM_STEPS", 40)
    findings = low_rank_toy.run(tmp_path, seeds=1, jobs=1, device="cpu")
    assert json.loads(json.dumps(findings, allow_nan=False))["kind"] == "findings"
    assert len(findings["charts"]) == 6
