"""Write the diffs of docs/at_home.md from the scripts in examples/at_home: `python docs/at_home.py [--check]`.

The lines that headwise adds to a script end with the comment `# headwise`; without them each script still trains.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, SCRIPTS = ROOT / "docs" / "at_home.md", ROOT / "examples" / "at_home"
MARK = "  # headwise"
# unchanged lines shown around a change
CONTEXT = 1
BLOCK = re.compile(r"(<!-- diff: (\w+\.py) -->\n).*?(<!-- end -->)", re.DOTALL)


def diff(script: Path) -> str:
    """Return the lines that a user adds to a script, with a line of context around each change, as a Markdown block."""
    lines = script.read_text(encoding="utf-8").splitlines()
    added = {number for number, line in enumerate(lines) if line.endswith(MARK)}
    numbers = sorted(
        {near for number in added for near in range(number - CONTEXT, number + CONTEXT + 1)} & {*range(len(lines))}
    )
    rows: list[str] = []
    for previous, number in zip([numbers[0], *numbers], numbers):
        line = lines[number].removesuffix(MARK)
        if number > previous + 1:
            rows.append("@@")
        if line or number in added:
            rows.append(f"{'+' if number in added else ' '}{line}".rstrip())
    return "\n".join(["```diff", *rows, "```"])


def without(script: Path) -> str:
    """Return the text of a script without the lines of headwise."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.endswith(MARK)) + "\n"


def renewed(page: str) -> str:
    """Return the page with its diffs replaced by the current ones."""
    return BLOCK.sub(lambda match: f"{match[1]}{diff(SCRIPTS / match[2])}\n{match[3]}", page)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(f"{PAGE} does not match the scripts: run python docs/at_home.py" if page != renewed(page) else 0)
    PAGE.write_text(renewed(page), encoding="utf-8")
