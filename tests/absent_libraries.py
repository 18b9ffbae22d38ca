"""Runs code as if libraries were not installed."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_without(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own in which these libraries are absent."""
    program = WITHOUT.format(names=names) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
