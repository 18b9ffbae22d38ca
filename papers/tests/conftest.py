"""What the studies' tests share: the real data sets, unpacked once a session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
