"""Earlier verdicts stay with a kept claim, and the figures of calculations and of second runs give the kept ones."""

from __future__ import annotations

import csv
import json

import pytest
from report.synthetic_study import write_study
from report.test_claims_shown import ARMS, CLAIMS, command

import headwise_verdict.reporting
from headwise_verdict.results.analysis_record import JudgedClaim
from headwise_verdict.results.digests import sealed
from headwise_verdict.results.records import Claim, ClaimTest, EarlierVerdict

EARLIER = EarlierVerdict(verdict="contrary", until="2026-01-02", why="premise after the runs")


def run(name, *arguments):
    done = command(name, *arguments)
    return done.returncode, done.stderr


def rows(path):
    return list(csv.reader(path.read_text(encoding="utf-8").splitlines()))[1:]


def test_a_verdict_that_decided_is_added_to_the_earlier_ones(tmp_path):
    made = write_study(tmp_path / "study", methods=ARMS, effects=(0, 0.03, -0.03), epochs=3, claims=CLAIMS)
    headwise_verdict.reporting.write(made)
    kept = tmp_path / "kept"
    assert run("keep_results.py", made, kept) == (0, "")
    path = kept / "claims.json"
    record = json.loads(path.read_text())
    first, second = record["claims"][:2]
    now = second["verdict"]
    # an open verdict may be given up without a trace; a decided one may not
    first["verdict"], second["verdict"] = "undecided", "no effect"
    second["before"] = [EARLIER.model_dump()]
    path.write_text(json.dumps(record))
    assert run("keep_results.py", made, kept) == (0, "")
    again = json.loads(path.read_text())["claims"]
    assert now != "no effect" and again[0]["before"] == again[2]["before"] == []
    assert [(one["verdict"], one["why"]) for one in again[1]["before"]] == [
        ("contrary", "premise after the runs"),
        ("no effect", "run again"),
    ]
    page = (kept / "README.md").read_text(encoding="utf-8")
    assert "contrary until 2026-01-02: premise after the runs; no effect until " in page


def test_what_a_claim_is_besides_measured_is_told_with_its_verdict():
    claim = JudgedClaim(text="A.", verdict="undecided", kind="figures known", before=[EARLIER])
    assert claim.history_words == (
        "stated when its figures were known; contrary until 2026-01-02: premise after the runs"
    )
    assert claim.once_contrary and not claim.model_copy(update={"verdict": "contrary"}).once_contrary
    assert JudgedClaim(text="A.", verdict="undecided").history_words == ""
    # records from JSON have lists
    assert Claim.model_validate({"text": "A.", "before": [EARLIER.model_dump()]}).before == (EARLIER,)


@pytest.mark.parametrize("wrong", ["", "mean", "verdict"])
def test_the_figures_of_a_calculation_give_its_verdicts(tmp_path, wrong, capsys):
    from headwise_papers.findings import findings

    below = Claim(text="It is small.", tests=(ClaimTest(arm="A", outcome="error", says="lower", level=1.0),))
    figures = {"A": [{"error": 0.1 * seed} for seed in range(8)]}
    found = findings("made", "T", "Q", figures, [below], labels={"error": "error"}, settings={})
    assert found["claims"][0]["kind"] == "calculation" and found["claims"][0]["verdict"] == "as published"
    if wrong:
        test = found["claims"][0]["tests"][0]
        test[wrong] = "contrary" if wrong == "verdict" else test[wrong] * 1.01
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "findings.json").write_text(json.dumps(found))
    assert command("recompute.py", "--results", tmp_path).returncode == bool(wrong)
    assert f"{wrong} of A in error" in capsys.readouterr().out if wrong else True


@pytest.mark.parametrize("change", [0.0, 0.001])
def test_a_second_run_of_the_baseline_gives_the_figures_by_seed_if_it_gives_the_kept_means(tmp_path, change, capsys):
    made = write_study(tmp_path / "study", methods=ARMS, effects=(0, 0.03, -0.03), epochs=3, claims=CLAIMS)
    headwise_verdict.reporting.write(made)
    kept = tmp_path / "kept"
    assert run("keep_results.py", made, kept) == (0, "")
    whole = rows(kept / "seeds.csv")
    (kept / "seeds.csv").unlink()
    for path in made.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        if result["arm"] == "baseline" and change:
            result["metrics"]["test/accuracy"] += change
            # the seal of a run that another computer made
            path.write_text(json.dumps(sealed(result)))
    done = command("seeds_from_baseline.py", made, kept)
    if change:
        assert done.returncode == 1 and "test/accuracy of baseline" in done.stderr
        assert not (kept / "seeds.csv").exists()
    else:
        assert done.returncode == 0, done.stderr
        by_cell = {tuple(row[:3]): float(row[3]) for row in whole}
        written = rows(kept / "seeds.csv")
        assert {row[1] for row in written} == set(ARMS)
        assert all(abs(by_cell[tuple(row[:3])] - float(row[3])) < 1e-12 for row in written)
