"""The kept results are computed again by code of its own, and judged again without training."""

from __future__ import annotations

import json

import pytest
from report.synthetic_study import write_study
from report.test_claims_shown import ARMS, CLAIMS, ROOT, command

import headwise.reporting


@pytest.fixture
def kept(tmp_path):
    made = write_study(tmp_path / "study", methods=ARMS, effects=(0, 0.03, -0.03), epochs=3, claims=CLAIMS)
    headwise.reporting.write(made)
    assert command("keep_results.py", made, tmp_path / "kept" / "synthetic").returncode == 0
    return tmp_path / "kept"


def test_what_is_kept_is_what_follows_from_its_csv(kept, capsys):
    assert command("recompute.py", "--results", kept).returncode == 0
    assert capsys.readouterr().out.endswith(" figures computed again, 0 mismatches\n")
    assert not [line for line in (ROOT / "docs" / "recompute.py").read_text().splitlines() if "import headwise" in line or "from headwise" in line]


@pytest.mark.parametrize("field", ["mean", "low", "p_corrected", "verdict"])
def test_a_figure_that_was_changed_is_found(kept, field, capsys):
    path = kept / "synthetic" / "analysis.json"
    analysis = json.loads(path.read_text())
    told = analysis["arms"][1]["differences"]["test/accuracy"]
    told[field] = "equivalent" if field == "verdict" else told[field] * 1.01
    path.write_text(json.dumps(analysis))
    assert command("recompute.py", "--results", kept).returncode == 1
    assert "of DropHead(p=0.2) in test/accuracy" in capsys.readouterr().out


def test_a_claim_whose_verdict_was_changed_is_found(kept, capsys):
    path = kept / "synthetic" / "claims.json"
    path.write_text(path.read_text().replace('"verdict": "contrary"', '"verdict": "as published"'))
    assert command("recompute.py", "--results", kept).returncode == 1
    assert "verdict of QKNorm() in test/accuracy, 'QKNorm helps | more.'" in capsys.readouterr().out


def test_every_figure_is_kept_by_seed_baseline_too(kept):
    lines = (kept / "synthetic" / "seeds.csv").read_text().splitlines()
    assert lines[0] == "outcome,arm,seed,value"
    assert sum(line.startswith("test/accuracy,baseline,") for line in lines) == 10


def test_judging_again_changes_nothing_that_was_judged_by_the_same_rules(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "docs")
    command("judge_again.py", "--check", "sigma-simclr")
    assert capsys.readouterr().out == "sigma-simclr\n\n"
