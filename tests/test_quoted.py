"""Figures in README.md and the guides are those of the kept results, and every interval is such a figure."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MADE = runpy.run_path(str(ROOT / "docs" / "quoted.py"))
GENERATED = re.compile(r"<!-- ([\w-]+): begin \(.*?<!-- \1: end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
NUMBER = r"[+−-]?\d[\d.,]*"
INTERVAL = re.compile(rf"\[{NUMBER}, {NUMBER}\]|interval {NUMBER} to {NUMBER}|(?:CI|95 %) {NUMBER} to {NUMBER}")
# A log of what was tried, and pages that programs write whole.
NOT_GUIDES = {"log.md", "changelog.md", "which_method.md", "wide_league.md", "families.md"}


def unmarked(text):
    """Return the intervals of a page that no program wrote; [0, 1] is the range of a share."""
    for pattern in (GENERATED, MADE["MARK"], CODE):
        text = pattern.sub("", text)
    return [found for found in INTERVAL.findall(text) if found != "[0, 1]"]


def test_every_interval_of_readme_and_guides_is_generated():
    guides = [page for page in MADE["pages"]() if page.name not in NOT_GUIDES]
    assert len(guides) > 20
    assert {page.name: found for page in guides if (found := unmarked(page.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "text", ["+4.6 [4.0, 5.1] points", "6.1 points (95 % interval 2.3 to 9.9)", "−0.3 [−0.5, −0.1]", "95 % CI 2 to 9"]
)
def test_an_interval_written_by_hand_is_found(text):
    assert unmarked(text)
    assert not unmarked(f"<!-- quoted: one -->{text}<!-- /quoted -->")
    assert unmarked(f"<!-- quoted: one -->{text}<!-- /quoted --> and {text}")


def test_the_pages_hold_the_figures_of_the_kept_results():
    texts = {name: MADE["text_of"](name, entry) for name, entry in MADE["entries"]().items()}
    for page in MADE["pages"]():
        text = page.read_text(encoding="utf-8")
        assert MADE["filled"](text, page.name, texts) == text, "run python docs/quoted.py"
    assert texts["cifar10-drop-head-sentence"] == "5.0 points (95 % CI 3.9 to 6.1; 10 paired seeds)"


def test_texts_are_filled_and_numbers_have_a_minus_sign():
    entry = {"results": "blog-cifar10", "arm": "RelaxedAttention(gamma=0.1)", "outcome": "test/accuracy"}
    text = MADE["text_of"]("one", {**entry, "percent": True, "text": "{difference:+.2f} [{difference_low:.2f}]"})
    assert text == "−0.94 [−1.77]"
    page = "a <!-- quoted: one -->old\ntext<!-- /quoted --> b"
    assert MADE["filled"](page, "a.md", {"one": text}) == f"a <!-- quoted: one -->{text}<!-- /quoted --> b"


def test_what_cannot_be_filled_is_told_by_name():
    entry = {"results": "blog-cifar10", "arm": "Missing()", "outcome": "test/accuracy", "text": "{mean}"}
    with pytest.raises(SystemExit, match=r"one quotes test/accuracy of Missing\(\), which has 0 rows"):
        MADE["text_of"]("one", entry)
    with pytest.raises(SystemExit, match=r"one cannot be filled \(KeyError: 'median'\)"):
        MADE["text_of"]("one", {**entry, "arm": "baseline", "text": "{median}"})
    with pytest.raises(SystemExit, match="the rule 'none'"):
        MADE["text_of"]("one", {"rule": "none", "file": "alarms.json", "text": "{lead}"})
    with pytest.raises(SystemExit, match=r"a\.md quotes two, which is not in"):
        MADE["filled"]("<!-- quoted: two -->x<!-- /quoted -->", "a.md", {})
    with pytest.raises(SystemExit, match=r"a\.md has a mark"):
        MADE["filled"]("<!-- quoted: two -->x", "a.md", {})
