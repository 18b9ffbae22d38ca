"""What NeuTRENO costs: the counts by hand on a small model, and every verdict."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from headwise_papers import neutreno_cost
from headwise_papers.findings import findings
from headwise_papers.neutreno_cost import measuring

import headwise_verdict.reporting
from headwise_verdict.files.durable import write_json
from headwise_verdict.results.analysis_record import JudgedClaim

SMALL = {"dim": 12, "depth": 3, "heads": 2, "head_dim": 6, "mlp_dim": 24, "patch": 2, "image_size": 4, "classes": 5}
TOKENS = 5


def test_operations_are_those_of_the_plain_model_and_the_rest_is_three_writes_a_layer():
    plain, fitted, images = measuring.build(SMALL, 4, torch.device("cpu"))
    before, after = measuring.cost(plain, images), measuring.cost(fitted, images)
    projections = 4 * TOKENS * (12 * 36 + 12 * 12 + 2 * 12 * 24)
    attention = 4 * 2 * 2 * TOKENS * TOKENS * 6
    rest = 4 * (4 * 3 * 2 * 2 * 12 + 12 * 5)
    assert before.flops == after.flops == 2 * (3 * (projections + attention) + rest)
    # V0 - V, the strength times it, and the sum, in every layer but the first
    assert after.others - before.others == pytest.approx(2 * 3 * 4 * TOKENS * 12, rel=0.2)
    assert after.memory > before.memory


def test_both_forms_compute_different_things():
    plain, fitted, images = measuring.build(SMALL, 2, torch.device("cpu"))
    with torch.no_grad():
        assert not torch.allclose(plain(images), fitted(images), atol=1e-4)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ([0.99, 1.0, 1.01] * 4, "as published"),
        ([0.95, 1.0, 1.12] * 4, "undecided"),
        ([1.06, 1.07, 1.08] * 4, "contrary"),
        ([1.0, 1.0], "undecided"),
    ],
)
def test_the_time_is_judged_by_its_interval(times, verdict):
    rounds = [{"operations": 1.0, "memory": 1.02, "time": ratio} for ratio in times]
    claims, labels = neutreno_cost.CLAIMS, neutreno_cost.LABELS
    found = findings("x", "X", "?", {"one image at a time": rounds}, claims[:3], labels=labels, settings={})
    enough = len(times) > 2
    counted = ["as published", "contrary"] if enough else ["undecided"] * 2
    assert [claim["verdict"] for claim in found["claims"]] == [*counted, verdict]


def test_the_findings_are_a_page_with_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "SHAPE", SMALL)
    found = neutreno_cost.run(tmp_path, seeds=6)
    claims = [JudgedClaim.model_validate(claim) for claim in found["claims"]]
    assert claims[0].verdict == "as published" and "1.0000, compared with 1.0000" in claims[0].ours
    write_json(tmp_path / "findings.json", found)
    assert "one image at a time" in headwise_verdict.reporting.write(tmp_path).read_text(encoding="utf-8")


PROFILED = """
import sys
from headwise.cli import main
sys.argv = ["headwise", "--version"]
try:
    main()
except SystemExit:
    pass
import torch
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
    torch.ones(3) + 1
"""


@pytest.mark.grid
def test_the_profiler_writes_nothing_to_the_terminal_of_the_command():
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("headwise ") and "profiler_st" not in done.stdout + done.stderr
