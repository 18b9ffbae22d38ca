"""`make bench-cuda` runs whole: as a dry run on the CPU, where it measures nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from headwise.attend import methods as shelf

ROOT = Path(__file__).parents[2]


@pytest.mark.grid
def test_the_benchmark_of_the_gpu_runs_whole():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "on_cuda.py", "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    rows = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("| ") and not line.startswith(("| method", "| shape"))
    ]
    # ten methods and four readings on two shapes, causal and not
    assert len(rows) == 2 * 2 * 10 + 2 * 2
    assert "these are not measurements" in done.stdout


def test_the_benchmark_of_fits_runs_whole():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "fits.py", "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == list(shelf.__all__)
