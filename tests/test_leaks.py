"""A test file that leaves a patch behind for the next one fails, and is named."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FILES = {
    "a fitted model": (
        """
        import headwise
        from torch import nn

        MODEL = nn.MultiheadAttention(8, 2)

        def test_regularize():
            headwise.regularize(MODEL, headwise.DropHead(p=0.1))
        """,
        "leaves behind 1 fitted site",
    ),
    "the function": (
        """
        import torch.nn.functional as F

        def test_replace():
            F.scaled_dot_product_attention = lambda *args: None
        """,
        "instead of F.scaled_dot_product_attention",
    ),
    "a model thrown away": (
        """
        import headwise
        from torch import nn

        def test_regularize():
            headwise.regularize(nn.MultiheadAttention(8, 2), headwise.DropHead(p=0.1))
        """,
        "",
    ),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run all files in one process, and return the report on each: its outcome, and the text of its failure."""
    folder = tmp_path_factory.mktemp("leaking")
    for left, (code, _) in FILES.items():
        (folder / f"test_{left.replace(' ', '_')}.py").write_text(textwrap.dedent(code))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-c", "pytest.ini"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    done = subprocess.run([*command, folder], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.grid
@pytest.mark.parametrize("left", FILES)
def test_a_file_that_leaves_something_behind_fails_and_is_named(left, reports):
    name, words = f"test_{left.replace(' ', '_')}.py", FILES[left][1]
    assert (f"{name} leaves behind" in reports) == bool(words), reports
    assert words in reports
