"""What the studies' tests share: the real data sets, unpacked once a session."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from headwise_papers.data import tinyshakespeare
from headwise_papers.tasks.character_lm import CHARACTERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def real_data(tmp_path_factory) -> Path:
    """A folder as `--data` takes it, with all data sets but CIFAR, which takes long to unpack."""
    shared = Path(os.environ.get("HEADWISE_SHARED", ROOT.parent / "shared" / "data"))
    if not (shared / "unpack.py").is_file():
        pytest.skip(f"no shared data at {shared}: set HEADWISE_SHARED")
    folder = tmp_path_factory.mktemp("real_data")
    names = ("text", "an4", "camvid", "frost", "sts2012")
    subprocess.run([sys.executable, shared / "unpack.py", folder, *names], check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text of as many different characters as tiny Shakespeare has, each followed by one of two."""
    monkeypatch.setattr(tinyshakespeare, "SOURCE", replace(tinyshakespeare.SOURCE, files={"input.txt": None}))
    rng, at, written = np.random.default_rng(0), 0, []
    for _ in range(12_000):
        written.append(chr(33 + at))
        at = (at + 1 + int(rng.integers(2))) % CHARACTERS
    folder = tmp_path / "data" / "tinyshakespeare"
    folder.mkdir(parents=True)
    (folder / "input.txt").write_text("".join(written), encoding="utf-8")
    return folder.parent
