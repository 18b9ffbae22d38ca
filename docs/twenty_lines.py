"""Run the README's example.

python docs/twenty_lines.py
"""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def twenty_lines() -> str:
    """Return the code of the README's example."""
    found = re.search(r"<!-- example.*?-->\s*```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"{README} holds no example: a comment <!-- example ... --> and a Python block below it")
    return found.group(1)


if __name__ == "__main__":
    exec(compile(twenty_lines(), str(README), "exec"), {"__name__": "__main__"})
