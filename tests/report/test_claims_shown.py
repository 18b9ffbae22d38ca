"""Judged claims on the report's page, in the terminal, in kept results, and in the one table over all studies."""

from __future__ import annotations

import contextlib
import html
import io
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from report.synthetic_study import write_study

import headwise_verdict.reporting
from headwise_verdict.results.table import print_answer

ROOT = Path(__file__).parents[2]
ARMS = ("baseline", "DropHead(p=0.2)", "QKNorm()")
CLAIMS = (
    {
        "text": "DropHead raises the accuracy of a small model that has seen few images, whatever the number of its "
        "heads.",
        "source": "Somebody 2020, arXiv 2000.00001",
        "published": {"gain": "+0.84 points"},
        "tests": [{"arm": ARMS[1], "outcome": "test/accuracy", "says": "higher", "effect": 0.0084}],
    },
    {"text": "QKNorm helps | more.", "tests": [{"arm": ARMS[2], "outcome": "test/accuracy", "says": "higher"}]},
    {"text": "QKNorm pleases.", "tests": [{"arm": ARMS[2], "outcome": "test/pleasure", "says": "higher"}]},
)
VERDICTS = ["same direction, larger", "contrary", "not testable here"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_study(
        tmp_path_factory.mktemp("study"), methods=ARMS, effects=(0, 0.03, -0.03), epochs=3, claims=CLAIMS
    )
    headwise_verdict.reporting.write(made)
    return made


def command(name, *arguments):
    """Run a command of docs/ in this process; give its exit status and what it said of errors."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.syspath_prepend(ROOT / "docs")
        try:
            runpy.run_path(str(ROOT / "docs" / name), run_name="__main__")
        except SystemExit as end:
            return SimpleNamespace(returncode=end.code or 0, stderr=said.getvalue())
    return SimpleNamespace(returncode=0, stderr=said.getvalue())


def test_the_analysis_holds_every_claim_with_its_verdict_and_its_figures(folder):
    claims = json.loads((folder / "analysis.json").read_text())["claims"]
    assert [claim["verdict"] for claim in claims] == VERDICTS
    (test,) = claims[0]["tests"]
    assert test["low"] < test["mean"] < test["high"] and test["power"] > 0.8
    assert claims[0]["published"] == {"gain": "+0.84 points"}
    assert claims[2]["why"] == "outcome test/pleasure was not recorded"


def test_the_page_says_the_claims_below_the_plot_and_the_table_that_answer(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    titles = re.findall(r"<h2[^>]*>(?:<a[^>]*>)?\s*([^<]+?)\s*<", page)
    assert titles[:3] == ["Paired differences", "Result", "Claims"], titles
    section = html.unescape(page[page.index("Claims that this study tests") :])
    places = [section.index(f">{verdict}<") for verdict in VERDICTS]
    assert places == sorted(places)
    assert "gain +0.84 points" in section and "Somebody 2020" in section
    assert re.search(
        r"test accuracy of DropHead\(p=0\.2\) \d\d\.\d\d, baseline \d\d\.\d\d %: \+\d\.\d\d points \[", section
    )


def test_the_terminal_says_each_claim_in_one_line(folder, capsys):
    print_answer(folder)
    lines = capsys.readouterr().out.splitlines()
    claims = [line for line in lines if line.startswith("claim, ")]
    assert [line.split(":")[0] for line in claims] == [f"claim, {verdict}" for verdict in VERDICTS]
    assert max(map(len, lines)) <= 80 and claims[0].endswith(" …")


def test_a_study_without_claims_has_no_section_and_no_file(tmp_path):
    made = write_study(tmp_path / "study", methods=ARMS[:2], effects=(0, 0), epochs=3)
    headwise_verdict.reporting.write(made)
    assert "Claims that" not in (made / "report.html").read_text(encoding="utf-8")
    # claims of an earlier form of the study do not outlive it
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "claims.json").write_text("{}")
    assert command("keep_results.py", made, tmp_path / "kept").returncode == 0
    assert not (tmp_path / "kept" / "claims.json").exists()


@pytest.mark.grid
def test_what_a_claim_is_judged_by_is_kept_as_a_table(tmp_path):
    claim = {"text": "DropHead widens no gap.", "tests": [{"arm": ARMS[1], "outcome": "gap/loss", "says": "lower"}]}
    for name, claims in (("with", (claim,)), ("without", ())):
        made = write_study(tmp_path / name, methods=ARMS, effects=(0, 0.03, -0.03), epochs=3, claims=claims)
        headwise_verdict.reporting.write(made)
        assert command("keep_results.py", made, tmp_path / "kept" / name).returncode == 0
        page = (tmp_path / "kept" / name / "README.md").read_text(encoding="utf-8")
        assert page.count("## Gap loss") == (name == "with") and page.count("## Test accuracy") == 1, page


def test_kept_claims_make_one_table_over_all_studies(folder, tmp_path):
    done = command("keep_results.py", folder, tmp_path / "synthetic")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "synthetic" / "README.md").read_text(encoding="utf-8")
    assert "**same direction, larger**" in page and "Scale: small." in page and "QKNorm helps \\| more." in page
    kept = json.loads((tmp_path / "synthetic" / "claims.json").read_text())
    assert (kept["scale"], kept["seeds"]) == ("small", 10)
    (tmp_path / "found").mkdir()
    own = {"text": "A law holds.", "verdict": "as published", "ours": "error 1e-6"}
    (tmp_path / "found" / "findings.json").write_text(json.dumps({"name": "found", "claims": [own]}))
    (tmp_path / "claims.md").write_text("Before.\n<!-- claims -->\nstale\n<!-- end of claims -->\nAfter.\n")

    assert command("claims_table.py", "--check", "--results", tmp_path).returncode == 1
    assert command("claims_table.py", "--results", tmp_path).returncode == 0
    assert command("claims_table.py", "--check", "--results", tmp_path).returncode == 0
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert page.startswith(
        "Before.\n<!-- claims -->\n4 claims of 2 studies. Measured, 4: as published 1, same direction, larger 1, "
        "contrary 1, not testable here 1."
    )
    assert page.endswith("<!-- end of claims -->\nAfter.\n") and "stale" not in page
    assert "| A law holds. | – | – | as published | calculation | – | error 1e-6 | [found](found/README.md) |" in page
    assert page.count("| small, 10 seeds |") == page.count("| [synthetic](synthetic/README.md) |") == 3
    assert (
        "| – | DropHead | same direction, larger | small, 10 seeds | gain +0.84 points | test accuracy of "
        "DropHead(p=0.2)" in page
    )


@pytest.mark.grid
def test_a_result_of_other_arms_than_its_study_has_is_named(tmp_path):
    made = write_study(tmp_path / "made", methods=ARMS, effects=(0, 0, 0), epochs=3)
    headwise_verdict.reporting.write(made)
    for name in ("entropy-collapse", "no-study"):
        assert command("keep_results.py", made, tmp_path / "kept" / name).returncode == 0
    (tmp_path / "kept" / "claims.md").write_text("<!-- claims -->\n<!-- end of claims -->\n")
    assert command("claims_table.py", "--results", tmp_path / "kept").returncode == 0
    (line,) = [line for line in (tmp_path / "kept" / "claims.md").read_text().splitlines() if "was made" in line]
    assert line.startswith(
        "[entropy-collapse](entropy-collapse/README.md) was made with `DropHead(p=0.2)`, `QKNorm()` and without"
    )
    assert 'without `QKNorm(norm="rms")`, `SigmaReparam(init="one")`, unlike' in line


@pytest.mark.parametrize("page", ["no marks", "<!-- claims -->", "<!-- end of claims --><!-- claims -->"])
def test_a_page_without_its_marks_is_refused(tmp_path, page):
    (tmp_path / "claims.md").write_text(page)
    done = command("claims_table.py", "--results", tmp_path)
    assert done.returncode == 1 and "needs one line '<!-- claims -->'" in done.stderr
    assert (tmp_path / "claims.md").read_text() == page


def test_claims_of_findings_are_shown_and_printed(tmp_path, capsys):
    own = {"text": "A law holds.", "verdict": "as published", "ours": "error 1e-6", "published": {"law": "exact"}}
    found = {"title": "Found", "paragraphs": ["Yes."], "claims": [own]}
    (tmp_path / "findings.json").write_text(json.dumps(found))
    headwise_verdict.reporting.write(tmp_path)
    print_answer(tmp_path)
    assert "claim, as published: A law holds." in capsys.readouterr().out
    assert "law exact" in (tmp_path / "report.html").read_text(encoding="utf-8")
