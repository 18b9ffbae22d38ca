"""The skill for agents: its front matter is valid, and its commands exist and run on a script like the one it shows."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SKILL = ROOT / "skills" / "headwise" / "SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")
HEAD, BODY = TEXT.split("---\n", 2)[1:]
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", BODY, re.DOTALL) for line in block.strip().splitlines()]
TRAINING = """
import argparse
import torch
{shown}
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
lr = parser.parse_args().lr
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for step in range(8):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(step=step + 1, loss=loss.item())
val_loss = min(loss.item(), 5.0)
{record}
"""


def test_the_front_matter_is_that_of_a_skill():
    head = yaml.safe_load(HEAD)
    assert set(head) <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert head["name"] == SKILL.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"])
    assert 100 < len(head["description"]) <= 1024 and "Use it when" in head["description"]
    assert len(head["compatibility"]) <= 500 and len(BODY.splitlines()) < 500


def test_every_command_and_option_of_it_exists():
    import typer.main

    from headwise.cli import app

    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_command(app).commands.items()
    }
    inline = [text for text in re.findall(r"`(headwise [^`\n]+)`", BODY) if " " in text]
    assert len(COMMANDS) == 3 and len(inline) >= 3
    for text in (*COMMANDS, *inline):
        name, *words = shlex.split(text)[1:]
        assert name in known, text
        assert {word for word in words if word.startswith("--")} - {"--help"} <= known[name], text


def test_what_must_not_be_done_is_also_in_the_guide_of_the_repository():
    guide = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert "skills/headwise/SKILL.md" in guide
    never = BODY.split("## Never")[1]
    for word in ("t-test after every seed", "choose seeds", "diverged run no figure", "ledger"):
        assert word in never and word in guide, word


@pytest.fixture
def folder(tmp_path):
    shown, record = re.search(r"```python\n(import headwise\n.*?)```", BODY, re.DOTALL)[1].split("...\n")
    (tmp_path / "train.py").write_text(TRAINING.format(shown=shown, record=record))
    rows = [
        (arm, seed, 3.2 + seed / 50 + (arm == "new") * (0.001 * seed - 0.05))
        for arm in ("main", "new")
        for seed in range(8)
    ]
    with open(tmp_path / "runs.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([("arm", "seed", "val_loss"), *rows])
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=["judge a script", "judge a table", "compare"])
def test_its_commands_run(folder, command):
    words = [sys.executable, "-m", *shlex.split(command.replace('"python ', f'"{sys.executable} '))]
    if "--seeds" in words:
        words[words.index("--seeds") + 1] = "2"
    if "--script" in words and "--budget" in words:
        words[words.index("--budget") + 1] = "2"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)
    answer = json.loads(done.stdout)
    if "compare" in words:
        assert done.returncode == 0 and len(answer["studies"][0]["arms"]) == 3
    else:
        assert done.returncode == answer["exit_code"] == (4 if "--script" in words else 0), done.stderr
        assert (folder / "judged.jsonl").is_file()


def test_the_lines_on_watching_run():
    import torch

    import headwise

    block = re.search(r"```python\n(watch = .*?)```", BODY, re.DOTALL)[1]
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    names = {"headwise": headwise, "model": model, "loss": torch.tensor(1.0)}
    begins, *others = block.split("...\n")
    exec(begins, names)
    model(torch.randn(2, 3, 8)).sum().backward()
    for part in others:
        exec(part, names)
    assert names["watch"].records()
