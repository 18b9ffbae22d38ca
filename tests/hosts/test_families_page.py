"""docs/families.md counts each type once, and its counts are those of its lists."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[2]
# The folder must not stay on the path: its files have names of the tests' own folders.
sys.path.insert(0, str(ROOT / "benchmarks"))
from families import OUTCOMES, Row, outcome, table  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))

PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" |")]


def rows_of(page: str) -> tuple[list[Row], list[str], dict[str, int]]:
    counted = {name: int(n) for name, n in re.findall(r"^\| ([a-z][a-z ,]+) \| (\d+) \|$", page, re.MULTILINE)}
    tried, _, untried = page.partition("## Refused classes")[0].partition("## Not tried")
    lines = tried.partition("| type | loaded as |")[2].splitlines()[2:]
    rows = [Row(*(cells(line) + [""] * 7)[:7]) for line in lines if line.startswith("| ")]
    left = [cells(line)[0] for line in untried.splitlines() if line.startswith("| ") and "first error" not in line]
    return rows, left, counted


def test_the_counts_add_up_and_are_those_of_the_lists():
    rows, untried, counted = rows_of(PAGE)
    assert set(counted) == set(OUTCOMES)
    lists = Counter(outcome(row) for row in rows) + Counter({"not tried": len(untried)})
    assert counted == {name: lists[name] for name in OUTCOMES}
    types = int(re.search(r"\| of (\d+) types \|", PAGE).group(1))
    names = [row.model_type for row in rows] + untried
    assert types == len(names) == len(set(names)) == sum(counted.values())


def test_the_sentence_on_neutral_types_is_that_of_the_list():
    rows, _, _ = rows_of(PAGE)
    run = [row.neutral for row in rows if row.neutral]
    said = [int(n) for n in re.search(r"Of the (\d+) types .* run, (\d+) are neutral to 1e-6, (\d+) of", PAGE).groups()]
    near = sum(found == "same bits" or float(found) <= 1e-6 for found in run)
    assert said == [len(run), near, sum(found == "same bits" for found in run)]


def test_the_page_names_no_file_of_the_machine_that_wrote_it():
    assert "site-packages" not in PAGE
    note = "not tried: neither in <module 'a.b' from '/home/me/site-packages/a/b.py'> nor in <module 'a' from '/a.py'>!"
    assert "| t | neither in a.b nor in a! |" in table([Row("t", note=note)])


def test_the_page_lists_every_type_that_transformers_registers():
    rows, untried, _ = rows_of(PAGE)
    assert {row.model_type for row in rows} | set(untried) == set(CONFIG_MAPPING_NAMES)


def test_readme_promises_no_more_than_the_page():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "any transformer" not in readme
    assert "an error names its layers. [Which models of transformers are reached](docs/families.md)" in readme


def test_a_page_written_from_rows_is_read_back():
    made = [
        Row("a", "sdpa", "2 transformers", "", "same bits", "0.1", ""),
        Row("b", "sdpa", "2 transformers", "OtherAttention", "2e-07", "0.1", ""),
        Row("c", "eager", "", "OtherAttention", "", "", ""),
        Row("d", "eager", "", "", "", "", "it has no attention"),
        Row("e", "sdpa", "2 fused", "", "", "", "raised in the call: x | y"),
        Row("f", note="not tried: ValueError: a | b"),
        Row(
            "g",
            "no weights",
            "2 transformers",
            "",
            "",
            "",
            "not run: ValueError: a",
            {"OtherAttention": "it does more"},
        ),
    ]
    rows, untried, counted = rows_of(table(made))
    assert [row.cells()[:6] for row in rows] == [row.cells()[:6] for row in (*made[:5], made[6])]
    assert untried == ["f"]
    assert list(counted.values()) == [1] * 7
    assert "| OtherAttention | it does more |" in table(made)
