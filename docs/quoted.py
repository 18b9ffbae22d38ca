"""Write the figures that README.md and the guides quote from the kept results, between their marks.

python docs/quoted.py            write them into every page
python docs/quoted.py --check    check whether they are current
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
QUOTED, RESULTS = DOCS / "quoted.toml", DOCS / "results"
MARK = re.compile(r"(<!-- quoted: (?P<name>\S+) -->)(?P<text>.*?)(<!-- /quoted -->)", re.DOTALL)
BEGIN, END = re.compile(r"<!-- quoted: "), re.compile(r"<!-- /quoted -->")
IN_PERCENT = ("mean", "low", "high", "difference", "difference_low", "difference_high")
COUNTS = ("pairs", "finished", "diverged", "missing")


def pages() -> list[Path]:
    """Return the pages that may quote figures: README.md and the guides."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def entries() -> dict[str, dict[str, Any]]:
    """Return what docs/quoted.toml says of each mark, by its name."""
    return tomllib.loads(QUOTED.read_text(encoding="utf-8"))


def figures(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that the text of an entry may name.

    Raises:
        SystemExit: if the kept results do not hold its arm and outcome, or its rule.
    """
    if "league" in entry:
        with (DOCS / entry["league"]).open(encoding="utf-8", newline="") as lines:
            kinds = {(row["kind"], row["entry"]) for row in csv.DictReader(lines)}
        count = {kind: sum(one == kind for one, _ in kinds) for kind in ("method", "control")}
        return {"methods": count["method"], "controls": count["control"], "entries": sum(count.values())}
    if "rule" in entry:
        path = RESULTS / "alarms" / entry["file"]
        rules = json.loads(path.read_text(encoding="utf-8"))
        if entry["rule"] not in rules:
            sys.exit(f"docs/quoted.toml: {name} quotes the rule {entry['rule']!r}, which {path.name} does not hold")
        rule = dict(rules[entry["rule"]])
        # false alarms in 10,000 steps, where its interval ends
        rule["most"] = 10 * rule["per_1000"][2]
        low, high = rule["lead_interval"] or (None, None)
        return rule | {"lead_low": low, "lead_high": high}
    table = RESULTS / entry["results"] / "table.csv"
    with table.open(encoding="utf-8", newline="") as lines:
        rows = [r for r in csv.DictReader(lines) if (r["arm"], r["outcome"]) == (entry["arm"], entry["outcome"])]
    if len(rows) != 1:
        sys.exit(
            f"docs/quoted.toml: {name} quotes {entry['outcome']} of {entry['arm']}, which has {len(rows)} rows in "
            f"docs/results/{entry['results']}/table.csv"
        )
    found: dict[str, Any] = {}
    for column, value in rows[0].items():
        if column in COUNTS:
            found[column] = int(value or 0)
        elif value and column not in ("arm", "outcome", "verdict_text"):
            found[column] = float(value) * (100 if entry.get("percent") and column in IN_PERCENT else 1)
    return found | {"runs": sum(found[column] for column in COUNTS[1:])}


def text_of(name: str, entry: dict[str, Any]) -> str:
    """Return the text between the marks of an entry.

    Raises:
        SystemExit: if it names a figure that its results do not hold.
    """
    try:
        text: str = entry["text"].format(**figures(name, entry))
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f"docs/quoted.toml: the text of {name} cannot be filled ({type(error).__name__}: {error})")
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text)


def filled(page: str, name: str, texts: dict[str, str]) -> str:
    """Return a page with the current text between all its marks; `name` is that of its file.

    Raises:
        SystemExit: if a mark is not in docs/quoted.toml or has no end.
    """
    marks = list(MARK.finditer(page))
    if not len(marks) == len(BEGIN.findall(page)) == len(END.findall(page)):
        sys.exit(f"{name} has a mark <!-- quoted: NAME --> without its <!-- /quoted -->, or the other way round")
    for mark in marks:
        if mark["name"] not in texts:
            sys.exit(f"{name} quotes {mark['name']}, which is not in docs/quoted.toml")
    return MARK.sub(lambda mark: f"{mark[1]}{texts[mark['name']]}{mark[4]}", page)


def main() -> None:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    texts = {name: text_of(name, entry) for name, entry in entries().items()}
    old, used = [], set[str]()
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = filled(before, path.name, texts)
        used |= {mark["name"] for mark in MARK.finditer(after)}
        if after != before:
            old.append(str(path.relative_to(DOCS.parent)))
            if not check:
                path.write_text(after, encoding="utf-8")
    if unused := sorted(set(texts) - used):
        sys.exit(f"docs/quoted.toml: no page quotes {', '.join(unused)}")
    if check and old:
        sys.exit(f"{', '.join(old)}: figures are not those of the kept results: run python docs/quoted.py")


if __name__ == "__main__":
    main()
