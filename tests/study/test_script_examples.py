"""The scripts of examples/script are carried out as runs of a study, at a tiny size."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from headwise.lab.experiments.configuration import RunConfiguration
from headwise.lab.files import script_run as files
from headwise.lab.training import script_run
from headwise.lab.training.job import ScriptOrder
from headwise.lab.training.script_process import carry_script
from headwise.lab.training.script_result import Telling

FOLDER = Path(__file__).parents[2] / "examples" / "script"
MARK = "# headwise"
ARM = "DropHead(p=0.3)"


@pytest.mark.parametrize(
    ("name", "most"), [("gpt", 10), ("finetune", 20), ("images", 20), ("bytes_with_accelerate", 20)]
)
def test_few_lines_are_headwises(name, most):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert 0 < sum(line.endswith(MARK) for line in lines) <= most
    assert not [
        line
        for line in lines
        if ("headwise." in line or "handle." in line or "run." in line) and not line.endswith(MARK)
    ]


def test_the_script_of_the_guide_is_of_150_lines():
    assert 140 <= len((FOLDER / "gpt.py").read_text().splitlines()) <= 165


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("to be, or not to be, that is the question. " * 30)
    return path


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """Return a function that carries out a script in this process as the run of an arm, and gives what it told."""

    def carry(name, *arguments, arm=ARM, seed=1, **terms):
        place = tmp_path / "run" / "told" / "1.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        methods = [{"name": "DropHead"}] if arm != "baseline" else []
        place.write_text(
            json.dumps({"arm": arm, "seed": seed, "methods": methods, "folder": str(tmp_path / "run" / "own")} | terms)
        )
        place.with_suffix(".jsonl").unlink(missing_ok=True)
        monkeypatch.setenv(files.VARIABLE, str(place))
        monkeypatch.setattr(files, "_current", [])
        monkeypatch.setattr(script_run, "_runs", [])
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return Telling(tmp_path / "run")

    return carry


def test_a_script_like_nanogpts(carried, text):
    size = ("--text", text, "--layers", 2, "--width", 16, "--length", 16, "--steps", 4, "--save-every", 2)
    told = carried("gpt.py", *size)
    assert told.records()["test"]["loss"] > 0 and len(told.logs()) == 4 and told.first("acted")
    # what was saved is gone on with
    again = carried("gpt.py", *size, resumed=True, acted=True)
    assert again.records() == told.records() and not again.logs()


def test_a_resumed_script_makes_the_draws_of_one_that_was_not_stopped(carried, text, tmp_path, monkeypatch):
    size = ("--text", text, "--layers", 2, "--width", 16, "--length", 16, "--steps", 6, "--save-every", 2)
    whole = carried("gpt.py", *size)
    shutil.rmtree(tmp_path / "run" / "own")
    replace = Path.replace

    def stopped(path, target):
        replace(path, target)
        if path.name.startswith("checkpoint"):
            raise KeyboardInterrupt

    with monkeypatch.context() as first:
        first.setattr(Path, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            carried("gpt.py", *size)
    rest = carried("gpt.py", *size, resumed=True, acted=True)
    assert [line["step"] for line in rest.logs()] == [3, 4, 5, 6]
    losses = [{line["step"]: line["figures"]["loss"] for line in told.logs()} for told in (whole, rest)]
    assert losses[1] == {step: losses[0][step] for step in losses[1]}
    assert rest.records() == whole.records()


def test_a_trainer_that_fine_tunes_a_pretrained_folder(carried, tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=40,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "pretrained")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "pretrained")
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("text,label\n" + "a good film,1\na bad film,0\n" * 8)
    data = ("--data", tmp_path / "train.csv", tmp_path / "test.csv")
    told = {
        arm: carried("finetune.py", "--model", tmp_path / "pretrained", *data, "--steps", 2, arm=arm)
        for arm in ("baseline",)
    }
    shutil.rmtree(tmp_path / "run" / "own")
    told[ARM] = carried("finetune.py", "--model", tmp_path / "pretrained", *data, "--steps", 2, arm=ARM)
    for one in told.values():
        assert (
            0 <= one.records()["test"]["accuracy"] <= 1 and one.records()["test"]["loss"] > 0 and len(one.logs()) == 2
        )
    assert told[ARM].first("takes")["steps"] == 2
    assert told[ARM].first("acted") and told["baseline"].evidence() == told[ARM].evidence()
    assert {"weights", "data/1", "data/2"} <= told[ARM].evidence().keys()


def test_a_script_with_accelerate(carried, text):
    pytest.importorskip("accelerate")
    told = carried("bytes_with_accelerate.py", "--text", text, "--layers", 2, "--width", 16, "--epochs", 1)
    assert told.records()["test"]["loss"] > 0 and told.first("acted") and len(told.evidence()) > 2


@pytest.mark.grid
def test_a_script_on_two_processes_records_once(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    draws = torch.Generator().manual_seed(0)
    for name in ("train.pt", "test.pt"):
        torch.save((torch.randn(16, 1, 8, 8, generator=draws), torch.arange(16) % 2), tmp_path / name)
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {FOLDER / 'images.py'}"
    command = f"{launch} --images {tmp_path / 'train.pt'} {tmp_path / 'test.pt'} --epochs 1 --depth 2 --width 16"
    configuration = RunConfiguration(
        study="images", task="images", settings={"script": command}, arm=ARM, methods=[{"name": "DropHead"}], seed=0
    )
    order = ScriptOrder(
        configuration,
        tmp_path / "study" / "runs" / "run",
        "",
        started_in=tmp_path,
        primary="test/accuracy",
        outcomes=("accuracy",),
    )
    result = carry_script(order, lambda event: None)
    assert result.status == "finished" and result.steps == 1 and {"weights", "data/1"} <= result.evidence.keys()
