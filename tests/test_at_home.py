"""The scripts of examples/at_home run at a tiny size, and docs/at_home.md shows what headwise adds to them."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "at_home").glob("*.py"))
TINY = ["--layers", "2", "--width", "16"]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import at_home

    return at_home


@pytest.fixture
def text(tmp_path):
    """Return a text of a few hundred bytes."""
    path = tmp_path / "input.txt"
    path.write_text("to be, or not to be, that is the question. " * 20)
    return ["--text", str(path)]


def run(name, *arguments, monkeypatch):
    """Run a script in this process and return its globals."""
    script = ROOT / "examples" / "at_home" / name
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    left = runpy.run_path(str(script), run_name="__main__")
    handle = left.get("regularized") or left["methods"].regularized
    assert handle.step > 0 and handle.seen_training
    handle.remove()
    return left


def test_the_page_shows_what_the_scripts_add(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.renewed(text), "run python docs/at_home.py"
    assert all(f"<!-- diff: {script.name} -->" in text for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_is_whole_without_headwise(page, script):
    before = page.without(script)
    compile(before, script.name, "exec")
    names = ("headwise", "regularized", "watch.", "methods")
    assert not [line for line in before.splitlines() if any(name in line for name in names)]
    assert len(script.read_text().splitlines()) <= 60


def test_accelerate(tmp_path, text, monkeypatch):
    pytest.importorskip("accelerate")
    left = run("accelerate_loop.py", *text, *TINY, "--epochs", 1, "--logs", tmp_path / "logs", monkeypatch=monkeypatch)
    assert left["regularized"].step == left["step"] == left["watch"].steps
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
    left["watch"].remove()


@pytest.mark.grid
def test_compiled(text, monkeypatch):
    torch._dynamo.reset()
    left = run("compiled_loop.py", *text, *TINY, "--steps", 3, "--backend", "eager", monkeypatch=monkeypatch)
    assert left["watch"].records()
    left["watch"].remove()
    torch._dynamo.reset()


def test_nanogpt(text, monkeypatch):
    run("nanogpt_loop.py", *text, *TINY, "--steps", 2, monkeypatch=monkeypatch)


# on a machine without a GPU
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
def test_trainer(tmp_path, text, monkeypatch):
    pytest.importorskip("transformers")
    arguments = [*text, *TINY, "--steps", 2, "--out", tmp_path / "out"]
    left = run("trainer_loop.py", *arguments, monkeypatch=monkeypatch)
    assert left["methods"].watch.records() and list((tmp_path / "out").rglob("checkpoint-2"))


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec:FutureWarning", "ignore:.*treespec:FutureWarning")
def test_lightning(tmp_path, text, monkeypatch):
    pytest.importorskip("lightning")
    arguments = [*text, *TINY, "--steps", 2, "--out", tmp_path]
    left = run("lightning_loop.py", *arguments, monkeypatch=monkeypatch)
    assert left["methods"].watch.records() and left["methods"].regularized.step == 2
    (kept,) = tmp_path.rglob("*.ckpt")
    left = run(
        "lightning_loop.py", *text, *TINY, "--steps", 3, "--out", tmp_path, "--resume", kept, monkeypatch=monkeypatch
    )
    assert left["methods"].regularized.step == 3


# timm leaves closing the files of its images to garbage collection
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_timm(tmp_path, monkeypatch):
    from PIL import Image

    pytest.importorskip("timm")
    for kind, colour in (("cats", (200, 30, 30)), ("dogs", (30, 30, 200))):
        (tmp_path / kind).mkdir()
        for number in range(8):
            Image.new("RGB", (40, 40), colour).save(tmp_path / kind / f"{number}.png")
    arguments = ["--images", tmp_path, "--size", 32, "--epochs", 1]
    left = run("timm_loop.py", *arguments, monkeypatch=monkeypatch)
    assert left["regularized"].step == 2 and left["watch"].records()
    left["watch"].remove()


# peft reads attributes of diffusers' models that these renamed
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_diffusers_lora(monkeypatch):
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    left = run("diffusers_lora.py", "--layers", 2, "--width", 16, "--steps", 2, monkeypatch=monkeypatch)
    assert {"text_to_image_mass", "attention_entropy"} <= {record["statistic"] for record in left["watch"].records()}
    left["watch"].remove()


# make test covers sharding in tests/integration/test_distributed.py
@pytest.mark.grid
def test_fsdp2_in_two_processes(text):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples" / "at_home" / "fsdp2_loop.py"), *text, *TINY, "--steps", "2"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=400) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "step 0: loss" in outputs[0][0] and "figures of 2 layers were read" in outputs[0][0]
