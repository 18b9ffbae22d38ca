"""The kept results are computed again by code of its own, and judged again without training."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest
from grids import part_of_grid
from report.synthetic_study import write_study
from report.test_claims_shown import ARMS, CLAIMS, ROOT, command

import headwise_verdict.reporting
from headwise_verdict.reporting.plain_tables import study_csv
from headwise_verdict.results.stored import checked_analysis


@pytest.fixture
def kept(tmp_path):
    made = write_study(tmp_path / "study", methods=ARMS, effects=(0, 0.03, -0.03), epochs=3, claims=CLAIMS)
    headwise_verdict.reporting.write(made)
    assert command("keep_results.py", made, tmp_path / "kept" / "synthetic").returncode == 0
    return tmp_path / "kept"


@pytest.mark.grid
def test_what_is_kept_is_what_follows_from_its_csv(kept, capsys):
    assert command("recompute.py", "--results", kept).returncode == 0
    assert capsys.readouterr().out.endswith(" figures computed again, 0 mismatches\n")
    assert not [
        line
        for line in (ROOT / "docs" / "recompute.py").read_text().splitlines()
        if "import headwise" in line or "from headwise" in line
    ]


@pytest.mark.parametrize("field", part_of_grid(["mean", "low", "p_corrected", "verdict"], ["verdict"]))
def test_a_figure_that_was_changed_is_found(kept, field, capsys):
    path = kept / "synthetic" / "analysis.json"
    analysis = json.loads(path.read_text())
    told = analysis["arms"][1]["differences"]["test/accuracy"]
    told[field] = "equivalent" if field == "verdict" else told[field] * 1.01
    path.write_text(json.dumps(analysis))
    assert command("recompute.py", "--results", kept).returncode == 1
    assert "of DropHead(p=0.2) in test/accuracy" in capsys.readouterr().out


@pytest.mark.grid
def test_a_claim_whose_verdict_was_changed_is_found(kept, capsys):
    path = kept / "synthetic" / "claims.json"
    path.write_text(path.read_text().replace('"verdict": "contrary"', '"verdict": "as published"'))
    assert command("recompute.py", "--results", kept).returncode == 1
    assert "verdict of QKNorm() in test/accuracy, 'QKNorm helps | more.'" in capsys.readouterr().out


def test_a_changed_mean_of_a_calculation_is_found(tmp_path, capsys):
    shutil.copytree(ROOT / "docs" / "results" / "decay-pretrained", tmp_path / "decay-pretrained")
    assert command("recompute.py", "--results", tmp_path).returncode == 0
    assert capsys.readouterr().out == "40 figures computed again, 0 mismatches\n"
    path = tmp_path / "decay-pretrained" / "findings.json"
    path.write_text(path.read_text().replace('"0.3436 [0.3376, 0.3497]"', '"0.3436 [0.3376, 0.3498]"'))
    assert command("recompute.py", "--results", tmp_path).returncode == 1
    assert "means over repeats of W_KᵀW_Q of stories260K, row norm of W_Q" in capsys.readouterr().out


DOSES = tuple(f"DropHead(p={value})" for value in (0.1, 0.2, 0.4))
AXIS = "DropHead(p={0.1,0.2,0.4})"


@pytest.fixture(scope="module")
def doses(tmp_path_factory):
    """Keep a study with an axis, runs that diverged, and claims of both and of a level."""
    tests = [
        {"arm": AXIS, "outcome": "test/accuracy", "says": "rises"},
        {"arm": AXIS, "outcome": "test/accuracy", "says": "inside"},
        {"arm": "QKNorm()", "outcome": "diverged", "says": "higher"},
        {"arm": DOSES[0], "outcome": "diverged", "says": "same", "margin": 0.5},
        {"arm": DOSES[1], "outcome": "test/accuracy", "says": "higher", "level": 0.3},
    ]
    claims = [{"text": f"Claim {at}.", "tests": [test]} for at, test in enumerate(tests)]
    folder = tmp_path_factory.mktemp("doses")
    made = write_study(
        folder / "study",
        methods=("baseline", *DOSES, "QKNorm()"),
        effects=(0, 0.02, 0.04, 0.08, 0),
        epochs=3,
        diverged={("QKNorm()", seed) for seed in range(8)},
        axes=[("p", (0.1, 0.2, 0.4), DOSES)],
        claims=claims,
    )
    study = json.loads((made / "study.json").read_text())
    study["axes"][0]["text"] = AXIS
    (made / "study.json").write_text(json.dumps(study))
    headwise_verdict.reporting.write(made)
    assert command("keep_results.py", made, folder / "kept" / "synthetic").returncode == 0
    return folder / "kept"


def test_axes_levels_and_divergence_follow_from_what_is_kept(doses, capsys):
    assert command("recompute.py", "--results", doses).returncode == 0, capsys.readouterr().out
    claims = json.loads((doses / "synthetic" / "claims.json").read_text())["claims"]
    assert all(claim["tests"][0]["n"] for claim in claims)


CHANGED = {
    "a figure of the table": (
        "analysis.json",
        lambda kept: kept["arms"][1]["metrics"]["test/accuracy"].update(high=0.9),
        "high of DropHead(p=0.1) in test/accuracy, in table.csv",
    ),
    "a trend": (
        "analysis.json",
        lambda kept: kept["trends"][0].update(step=kept["trends"][0]["step"] * 1.01),
        "step of test/accuracy along p",
    ),
    "a p of diverged runs": (
        "analysis.json",
        lambda kept: kept["arms"][4]["divergence"].update(p_corrected=0.5),
        "corrected p of diverged runs of QKNorm()",
    ),
    "along an axis": (
        "claims.json",
        lambda kept: kept["claims"][0]["tests"][0].update(mean=9.0),
        "mean of DropHead(p={0.1,0.2,0.4}) in test/accuracy, 'Claim 0.'",
    ),
    "inside an axis": (
        "claims.json",
        lambda kept: kept["claims"][1]["tests"][0].update(verdict="as published"),
        "verdict of DropHead(p={0.1,0.2,0.4}) in test/accuracy, 'Claim 1.'",
    ),
    "more diverged": (
        "claims.json",
        lambda kept: kept["claims"][2]["tests"][0].update(verdict="undecided"),
        "verdict of QKNorm() in diverged, 'Claim 2.'",
    ),
    "as many diverged": (
        "claims.json",
        lambda kept: kept["claims"][3]["tests"][0].update(verdict="undecided"),
        "verdict of DropHead(p=0.1) in diverged, 'Claim 3.'",
    ),
    "a level": (
        "claims.json",
        lambda kept: kept["claims"][4]["tests"][0].update(low=-1.0),
        "interval of DropHead(p=0.2) in test/accuracy, 'Claim 4.'",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_figure_of_an_axis_of_a_level_or_of_divergence_is_found(doses, tmp_path, what, capsys):
    name, change, said = CHANGED[what]
    shutil.copytree(doses, tmp_path / "kept")
    path = tmp_path / "kept" / "synthetic" / name
    kept = json.loads(path.read_text())
    change(kept)
    path.write_text(json.dumps(kept))
    assert command("recompute.py", "--results", tmp_path / "kept").returncode == 1
    assert said in capsys.readouterr().out


def test_without_figures_by_seed_a_level_is_held_against_the_kept_interval(doses, tmp_path, capsys):
    shutil.copytree(doses, tmp_path / "kept")
    (tmp_path / "kept" / "synthetic" / "seeds.csv").unlink()
    # its interval was of joint flips; that of the table is Student's
    assert command("recompute.py", "--results", tmp_path / "kept").returncode == 1
    assert "interval of DropHead(p=0.2) in test/accuracy, 'Claim 4.'" in capsys.readouterr().out


@pytest.mark.grid
def test_every_figure_is_kept_by_seed_baseline_too(kept):
    lines = (kept / "synthetic" / "seeds.csv").read_text().splitlines()
    assert lines[0] == "outcome,arm,seed,value"
    assert sum(line.startswith("test/accuracy,baseline,") for line in lines) == 10


def test_judging_again_changes_nothing_that_was_judged_by_the_same_rules(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "docs")
    command("judge_again.py", "--check", "sigma-simclr")
    assert capsys.readouterr().out == "sigma-simclr\n\n"


def test_judging_again_writes_the_table_again(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs")
    judge_again = importlib.import_module("judge_again")
    folder = tmp_path / "sigma-simclr"
    shutil.copytree(ROOT / "docs" / "results" / folder.name, folder)
    (folder / "table.csv").write_text("arm,outcome\n")
    judge_again.renew(folder, write=True)
    assert (folder / "table.csv").read_text() == study_csv(checked_analysis(folder / "analysis.json"))
