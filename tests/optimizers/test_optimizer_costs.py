"""The table of what a step of each optimizer costs is what counting gives."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.grid
def test_the_counts_on_the_page_are_current():
    command = [sys.executable, str(ROOT / "benchmarks" / "optimizer_costs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
