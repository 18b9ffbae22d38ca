"""The pages of the four sources: every claim in its place, lines that are short, sentences that fit the verdicts, and
the forest plot."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as tree
from pathlib import Path

import pytest
from report.test_claims_shown import command

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
MARKS = "<!-- sources -->\n<!-- end of sources -->\n"
SOURCES = """
[[source]]
key = "one"
name = "Somebody 2020"
title = "A paper"
about = "Two figures."
held = "The first."
topic = "Paper"
failed = "The second."
open = "The third."
untested = "The fourth."
[source.rests]
"study: First" = "same direction, smaller"

[[source.part]]
place = "Fig. 1"
claims = [{ of = "study: First" }, { of = "study: Second", care = "On few images." }]

[[source.part]]
place = "Fig. 2"
missing = "No GPU."

[[source.part]]
kind = "own"
place = "Beside"
claims = [{ of = "study: Third" }]
"""


def judged(text, verdict, **more):
    test = {"arm": "A()", "outcome": "test/accuracy", "says": "higher", "verdict": verdict, "n": 10, "p": 0.01} | more
    return {"text": text, "source": "Somebody 2020", "verdict": verdict, "tests": [test]}


@pytest.fixture
def kept(tmp_path):
    claims = [
        judged("First of all.", "same direction, smaller", mean=0.02, low=0.01, high=0.03, effect=0.04),
        judged("Second | of all.", "contrary", mean=-0.02, low=-0.03, high=-0.01),
        judged("Third of all.", "undecided", mean=0.01, low=-0.01, high=0.03, says="same", margin=0.02),
    ]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "claims.json").write_text(
        json.dumps({"study": "study", "scale": "small", "seeds": 10, "claims": claims})
    )
    (tmp_path / "sources.toml").write_text(SOURCES)
    (tmp_path / "README.md").write_text(f"Before.\n{MARKS}After.\n")
    return tmp_path


def test_a_source_is_shown_in_its_order_with_what_is_missing(kept):
    assert command("source_pages.py", "--check", "--results", kept).returncode == 1
    assert command("source_pages.py", "--results", kept).returncode == 0
    assert command("source_pages.py", "--check", "--results", kept).returncode == 0
    page = (kept / "sources" / "one.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][6:]
    assert rows[2].startswith(
        "| Fig. 1 | First of all. | **same direction, smaller** `small, 10 seeds` | [study](../study/README.md) |"
    )
    assert rows[3].startswith("|  | Second \\| of all. *On few images.* | **contrary** `small, 10 seeds` |")
    assert rows[4] == "| Fig. 2 | No GPU. | **not run** | – |"
    assert "## Apart: own questions" in page and page.index("Third of all") > page.index("## Apart")
    screen = (kept / "README.md").read_text(encoding="utf-8")
    assert "| [Somebody 2020](sources/one.md), Paper | The first. | The second. | The third. | The fourth. |" in screen
    # as published, other size, no effect, contrary, too wide, undecided, not testable, not run; once contrary, once so
    assert "| [Somebody 2020](sources/one.md), Paper | – | 1 | – | 1 | – | – | – | 1 | – | – |" in screen
    assert "| apart: own questions | – | – | – | – | – | 1 | – | – | – | – |" in screen
    assert screen.startswith("Before.\n") and screen.endswith("After.\n")


def test_earlier_verdicts_and_claims_that_are_not_measured_are_counted_apart(kept):
    path = kept / "study" / "claims.json"
    record = json.loads(path.read_text())
    _, second, third = record["claims"]
    second |= {"verdict": "not testable here", "kind": "figures known"}
    second["before"] = [{"verdict": "contrary", "until": "2026-01-02", "why": "premise after the runs"}]
    third["verdict"] = third["tests"][0]["verdict"] = "not testable here"
    path.write_text(json.dumps(record))
    sources = (kept / "sources.toml").read_text()
    # a claim that cannot be decided is part of the line of what is missing
    folded = sources.replace('missing = "No GPU."', 'missing = "No GPU."\nfolded = ["study: Third"]').split(
        '[[source.part]]\nkind = "own"'
    )[0]
    (kept / "sources.toml").write_text(folded)
    (kept.parent / "README.md").write_text("<!-- claims counted -->\nstale\n<!-- end of claims counted -->\n")
    done = command("source_pages.py", "--results", kept)
    assert done.returncode == 0, done.stderr
    page, screen = ((kept / name).read_text(encoding="utf-8") for name in ("sources/one.md", "README.md"))
    assert (
        "**not testable here** `small, 10 seeds` `stated when figures were known` "
        "*contrary until 2026-01-02: premise after the runs* |" in page
    )
    assert "| Fig. 2 | No GPU. | **not run** | [study](../study/README.md) |" in page and "Third" not in page
    assert "| The second. Once contrary: 1. |" in screen
    assert "Paper | – | 1 | – | – | – | – | – | 1 | – | – |\n| – stated when figures were known |" in screen
    assert "| – stated when figures were known | – | – | – | – | – | – | 1 | – | 1 | – |" in screen
    assert (
        "1 claims of the 1 sources were written down" in screen
        and "1 stated when figures were known. 1 of the sources'" in screen
    )
    # a claim that was contrary is folded into no other line
    (kept / "sources.toml").write_text(
        folded.replace("study: Third", "study: Second").replace(
            '{ of = "study: Second", care = "On few images." }', '{ of = "study: Third" }'
        )
    )
    done = command("source_pages.py", "--results", kept)
    assert done.returncode == 1 and "folds a claim that is decided, or was contrary" in done.stderr


def test_a_contrary_claim_that_was_filed_apart_still_counts_for_its_source(kept):
    path, text = kept / "study" / "claims.json", (kept / "sources.toml").read_text()
    record = json.loads(path.read_text())
    record["claims"][2] = judged("Third of all.", "contrary", mean=-0.02, low=-0.03, high=-0.01)
    path.write_text(json.dumps(record))
    own = '{ of = "study: Third", refiled = "2026-01-03" }'
    (kept / "sources.toml").write_text(text.replace('{ of = "study: Third" }', own))
    assert command("source_pages.py", "--results", kept).returncode == 0
    page, screen = ((kept / name).read_text(encoding="utf-8") for name in ("sources/one.md", "README.md"))
    assert "**contrary** `small, 10 seeds` *the source's until 2026-01-03, and contrary* |" in page
    assert "| The second. Once contrary: 1. |" in screen and "1 of the sources' claims were first judged" in screen
    assert "Paper | – | 1 | – | 1 | – | – | – | 1 | 1 | – |" in screen
    assert "| apart: own questions | – | – | – | 1 | – | – | – | – | – | – |" in screen


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([{"mean": -0.01}], "undecided, measured the other way"),
        ([{"mean": 0.01}], "undecided"),
        ([{"mean": -0.01}, {"mean": 0.01}], "undecided, measured in part the other way"),
        ([{"mean": -0.01, "says": "lower"}], "undecided"),
        # a part that is decided, one with an amount to exceed, and one of sameness point nowhere
        (
            [
                {"mean": -0.01, "verdict": "as published"},
                {"mean": -0.01, "by": 0.02},
                {"mean": -0.01, "says": "same", "margin": 0.02},
            ],
            "undecided",
        ),
    ],
)
def test_an_undecided_claim_says_whether_the_measured_mean_points_the_other_way(kept, tests, words):
    path = kept / "study" / "claims.json"
    record = json.loads(path.read_text())
    third = judged("Third of all.", "undecided")
    third["tests"] = [third["tests"][0] | more for more in tests]
    path.write_text(json.dumps(record | {"claims": [*record["claims"][:2], third]}))
    assert command("source_pages.py", "--results", kept).returncode == 0
    assert f"| **{words}** `small, 10 seeds` |" in (kept / "sources" / "one.md").read_text(encoding="utf-8")


def test_the_plot_shows_effects_as_multiples_of_the_published_ones(kept):
    assert command("source_pages.py", "--results", kept).returncode == 0
    words = [one.text for one in tree.parse(kept / "sources" / "one.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert words[:1] == ["effect as a multiple of the published one →"] and "0.5 [0.25, 0.75]" in words
    # no published size: half-widths of the interval, the published direction to the right
    assert "−2 [−3, −1]" in words
    # an own question is not among the published ones
    assert "Third of all." not in words


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"study: First" = "same direction, smaller"', '"study: First" = "as published"', "read its sentences again"),
        ('{ of = "study: Third" }', '{ of = "study: First" }', "is in two places"),
        ('{ of = "study: Third" }', '{ of = "study: First" }', "'Third of all.' is in no place"),
        ('{ of = "study: Third" }', '{ of = "study: Fourth" }', "finds 0 claims"),
        ('care = "On few images."', f'care = "{"few " * 21}"', "more than 20 words"),
        ('missing = "No GPU."', "", "needs claims, or why there are none"),
        ('kind = "own"', 'kind = "owned"', "a kind of published, own"),
        ('{ of = "study: Third" }', '{ of = "study: Third", refiled = "2026-01-03" }', "or never was contrary"),
        ('care = "On few images."', 'refiled = "2026-01-03"', "is the source's still"),
    ],
)
def test_what_does_not_fit_the_kept_results_is_named_and_nothing_is_written(kept, old, new, said):
    text = (kept / "sources.toml").read_text()
    assert old in text
    (kept / "sources.toml").write_text(text.replace(old, new))
    done = command("source_pages.py", "--results", kept)
    assert done.returncode == 1 and said in done.stderr
    assert MARKS in (kept / "README.md").read_text() and not (kept / "sources").exists()


def test_a_page_whose_source_is_gone_goes(kept):
    assert command("source_pages.py", "--results", kept).returncode == 0
    (kept / "sources" / "gone.md").write_text("old")
    assert command("source_pages.py", "--check", "--results", kept).returncode == 1
    assert command("source_pages.py", "--results", kept).returncode == 0
    assert not (kept / "sources" / "gone.md").exists()


def test_the_kept_pages_are_current_and_the_screen_is_short():
    assert command("source_pages.py", "--check").returncode == 0
    screen = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert len(screen.splitlines()) <= 50
    cells = [cell for line in screen.splitlines() if line.startswith("|") for cell in re.split(r"(?<!\\)\|", line)]
    assert max(len(cell.split()) for cell in cells) <= 31
    for missing in ("ImageNet-A", "DeiT-small", "LLaMA-2", "100 layers", "LibriSpeech", "WMT", "ViT-B"):
        assert any(missing in path.read_text(encoding="utf-8") for path in (RESULTS / "sources").glob("*.md")), missing
