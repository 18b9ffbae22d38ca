"""The theory of NeuTRENO: each statement at a small size, and that a wrong one would be seen."""

from __future__ import annotations

import pytest
import torch
from headwise_papers import neutreno_theory
from headwise_papers.neutreno_theory import passes

import headwise_verdict.reporting
from headwise_verdict.files.durable import write_json
from headwise_verdict.results.analysis_record import JudgedClaim


def test_a_walk_that_is_followed_ends_where_the_passes_do():
    assert passes.walk_error(0, "attention") < 1e-12


@pytest.mark.parametrize("kind", passes.KINDS)
def test_the_stationary_distribution_is_left_as_it_is(kind):
    kernel, _ = passes.layer(0, kind)
    attention = kernel / kernel.sum(1, keepdim=True)
    stationary = passes.stationary_of(attention)
    assert stationary.min() > 0 and float(stationary.sum()) == pytest.approx(1)
    assert torch.allclose(stationary @ attention, stationary, atol=1e-12)
    # and is the share of the kernel where that is symmetric alone
    share = kernel.sum(1) / kernel.sum()
    assert torch.allclose(share, stationary, atol=1e-12) == (kind == "symmetric")


def test_without_the_fidelity_term_nothing_of_the_spread_stays_and_with_it_the_fixed_point_does():
    kernel, values = passes.layer(1, "attention")
    attention = kernel / kernel.sum(1, keepdim=True)
    assert passes.spreads(attention, values, 0.0)[-1] < 1e-12
    end = 0.6 * torch.linalg.solve(1.6 * torch.eye(len(attention)).double() - attention, values)
    left = float((end - end.mean(0)).norm() / (values - values.mean(0)).norm())
    assert passes.spreads(attention, values, 0.6)[-1] == pytest.approx(left)
    assert passes.fixed_point_error(attention, values, 0.6) < 1e-12


def test_a_strength_beyond_one_and_the_least_eigenvalue_does_not_converge():
    kernel, values = passes.layer(1, "attention")
    attention = kernel / kernel.sum(1, keepdim=True)
    least = float(torch.linalg.eigvals(attention).real.min())
    assert passes.fixed_point_error(attention, values, 1 + least + 0.01) is None
    assert passes.fixed_point_error(attention, values, 1 + least - 0.1) is not None


def test_a_step_of_symmetric_attention_is_one_on_the_functional_and_that_of_attention_is_none():
    errors = {kind: passes.step_error(*passes.layer(2, kind)) for kind in passes.KINDS}
    assert errors["symmetric"] < 1e-12 and errors["attention"] > 0.1


def test_the_findings_are_claims_with_verdicts_and_a_page(tmp_path):
    found = neutreno_theory.run(tmp_path, seeds=6)
    claims = [JudgedClaim.model_validate(claim) for claim in found["claims"]]
    assert [claim.verdict for claim in claims] == ["as published"] * 5
    write_json(tmp_path / "findings.json", found)
    page = headwise_verdict.reporting.write(tmp_path).read_text(encoding="utf-8")
    assert "Proposition 1" in page and "layers that converge at λ = 2" in page
    words = "Of 5 claims 3 as published (true by construction), 2 as published (calculations)."
    assert found["paragraphs"][0] == words


@pytest.mark.grid
def test_a_claim_that_numbers_contradict_does_not_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "LIMIT", 2)
    found = neutreno_theory.run(tmp_path, seeds=6)
    verdicts = [claim["verdict"] for claim in found["claims"]]
    assert verdicts == ["as published", "contrary", "as published", "as published", "as published"]
    assert "Contrary: The walk has one stationary distribution" in found["paragraphs"][0]
