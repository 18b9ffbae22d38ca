"""Write the diffs of docs/at_home.md from the scripts in examples/at_home: `python docs/at_home.py [--check]`.

In the scripts the lines that headwise adds end with a comment `# headwise`; without them each is a script that trains.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, SCRIPTS = ROOT / "docs" / "at_home.md", ROOT / "examples" / "at_home"
MARK = "  # headwise"
# lines around a change
CONTEXT = 1
BLOCK = re.compile(r"(<!-- diff: (\w+\.py) -->\n).*?(<!-- end -->)", re.DOTALL)


def diff(script: Path) -> str:
    """Return what a user adds to a script, with a line around each change."""
    lines = script.read_text(encoding="utf-8").splitlines()
    added = {number for number, line in enumerate(lines) if line.endswith(MARK)}
    shown = sorted(
        {near for number in added for near in range(number - CONTEXT, number + CONTEXT + 1)} & {*range(len(lines))}
    )
    rows: list[str] = []
    for before, number in zip([shown[0], *shown], shown):
        line = lines[number].removesuffix(MARK)
        if number > before + 1:
            rows.append("@@")
        if line or number in added:
            rows.append(f"{'+' if number in added else ' '}{line}".rstrip())
    return "\n".join(["```diff", *rows, "```"])


def without(script: Path) -> str:
    """Return a script as it was before: without the lines of headwise."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.endswith(MARK)) + "\n"


def renewed(page: str) -> str:
    """Return the page with the diffs that the scripts have now."""
    return BLOCK.sub(lambda found: f"{found[1]}{diff(SCRIPTS / found[2])}\n{found[3]}", page)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(f"{PAGE} is not what the scripts say: run python docs/at_home.py" if page != renewed(page) else 0)
    PAGE.write_text(renewed(page), encoding="utf-8")
