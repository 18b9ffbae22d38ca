"""Write the sources of the methods from verdict/src/headwise_verdict/reporting/references.bib into CITATION.cff.

python docs/citation.py            write them below the mark
python docs/citation.py --check    check whether they are current
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "CITATION.cff"
BIB = ROOT / "verdict" / "src" / "headwise_verdict" / "reporting" / "references.bib"
MARK = "# sources: python docs/citation.py\n"
KINDS = {"inproceedings": "conference-paper", "article": "article", "misc": "article"}
# the studies that repeat a source's experiments
STUDIES = {
    "meindl2023": "the studies whose names begin with blog",
    "nguyen2023": "the studies whose names begin with neutreno",
    "zhai2023": "the studies whose names begin with sigma, and entropy-collapse",
    "kobayashi2024": "the studies whose names begin with decay",
}
SIGNS = {r"{\L}": "Ł", r"{\'e}": "é", r"{\c{c}}": "ç", r"\&": "&"}


def sources() -> str:
    """Return the references in the form of the citation file format."""
    text = BIB.read_text(encoding="utf-8")
    for code, sign in SIGNS.items():
        text = text.replace(code, sign)
    return "references:\n" + "".join(map(_reference, re.findall(r"^@(\w+)\{(\w+),\n(.*?)^\}$", text, re.M | re.S)))


def _reference(entry: tuple[str, str, str]) -> str:
    kind, key, body = entry
    field = dict(re.findall(r"^  (\w+) = \{(.*)\},$", body, re.MULTILINE))
    blog = field.get("note") == "Blog post"
    lines = [f"type: {'blog' if blog else KINDS[kind]}", f"title: {_text(field['title'])}", "authors:"]
    for author in field["author"].split(" and "):
        family, _, given = author.partition(", ")
        if not given:
            lines.append(f"  - name: {_text('et al.' if family == 'others' else family)}")
        else:
            lines += [f"  - family-names: {_text(family)}", f"    given-names: {_text(given)}"]
    url = field.get("url") or f"https://arxiv.org/abs/{field['eprint']}"
    notes = [field["usedby"], *([STUDIES[key]] if key in STUDIES else [])]
    lines += [f"year: {field['year']}", f"url: {_text(url)}", f"notes: {_text('; '.join(notes))}"]
    return f"  - {lines[0]}\n" + "".join(f"    {line}\n" for line in lines[1:])


def _text(words: str) -> str:
    return json.dumps(re.sub(r"[{}]", "", words), ensure_ascii=False)


def main() -> None:
    """Write the file, or check it."""
    old = FILE.read_text(encoding="utf-8")
    new = old.partition(MARK)[0] + MARK + sources()
    if "--check" in sys.argv and new != old:
        raise SystemExit(f"{FILE} is not current: run python docs/citation.py")
    FILE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
