"""Phrases that a reader has to read twice stay away from code, messages and pages; each has a plain form."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# what must not come back → what to write instead
INSTEAD = {
    r"hangs? on (the|its|what|whether|where)\b": "depends on",
    r"[Ww]ith nothing beside": "alone",
    r"of one core that others shared": "measured on a shared machine",
    r"quiet (machine|cores)": "idle machine",
    r"stays in when": "remains when",
    r"too little of its tokens' norm": "the tokens of a layer are nearly equal",
    r"[Tt]he settings stand in": "the settings are in",
    r'"""(Give|Returns) ': '"""Return ',
}
FILES = sorted(
    path
    for pattern in ("src/**/*.py", "papers/**/*.py", "docs/*.md", "docs/site/*.py", "benchmarks/*.py", "*.md")
    for path in ROOT.glob(pattern)
    if path.name != "log.md" and ".egg-info" not in str(path)
)


def found(text):
    """Return the lines of a text that hold a phrase, each with what to write instead."""
    return [
        f"line {number}: {line.strip()[:90]!r}: write {better!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for phrase, better in INSTEAD.items()
        if re.search(phrase, line)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_that_is_read_twice(path):
    told = found(path.read_text(encoding="utf-8"))
    assert not told, f"{path.relative_to(ROOT)}:\n" + "\n".join(told)


def test_a_phrase_is_found_with_its_plain_form():
    assert found("the result does not hang on the order\n") == [
        "line 1: 'the result does not hang on the order': write 'depends on'"
    ]
