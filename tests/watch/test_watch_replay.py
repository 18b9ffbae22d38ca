"""Replay files: the steps before an alert, run again from what was kept of them."""

import random
import subprocess
import sys
import textwrap

import pytest
import torch
from small_models import HOSTS, fresh
from torch import nn

import headwise
from headwise.health.watching.replay import replay
from headwise.health.watching.replay_file import read_replay

EXAMPLES = torch.randn(40, 9, 32, generator=torch.Generator().manual_seed(1))
NAMES = ["entropy_share", "max_logit", "loss_spike"]


class Training:
    """A training with dropout, drawn batches, a schedule and, where asked, a method with draws of its own."""

    def __init__(self, methods=(), rate=1e-2):
        self.model = fresh(HOSTS["own"])
        self.model.dropout = nn.Dropout(0.3)
        self.model.register_forward_hook(lambda module, args, output: module.dropout(output))
        self.handle = headwise.regularize(self.model, *methods, example=EXAMPLES[:4], seed=3) if methods else None
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.losses = []

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(EXAMPLES[batch]).square().mean() * (1 + 0.1 * random.random())
        loss = loss if self.handle is None else loss + self.handle.loss()
        loss.backward()
        self.optimizer.step()
        if self.handle is not None:
            self.handle.after_step()
        self.losses.append(loss.item())
        return loss

    def run(self, watch, steps, grows_at=None):
        for step in range(steps):
            if step == grows_at:
                # not by the optimizer: a replay must begin at weights that were kept after it
                with torch.no_grad():
                    for block in self.model.blocks:
                        block.attn.qkv.weight[:64] *= 12
            batch = torch.randint(len(EXAMPLES), (4,)).tolist()
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            loss = self.step(batch)
            watch.step(loss, batch=batch)


def kept(tmp_path, methods=(), keep=3, every=2, steps=16, grows_at=8):
    torch.manual_seed(5)
    random.seed(5)
    training = Training(methods)
    watch = headwise.watch(
        training.model,
        every=every,
        on_alert=None,
        statistics=NAMES,
        keep=keep,
        keep_in=tmp_path,
        thresholds=headwise.Thresholds(max_logit=20.0, entropy_share=None),
    )
    training.run(watch, steps, grows_at)
    return training, watch


@pytest.mark.parametrize("methods", [(), (headwise.DropHead(p=0.4), headwise.Decorrelation(strength=0.1))], ids=str)
def test_the_steps_of_a_file_run_again_to_the_same_losses_and_readings(methods, tmp_path):
    training, watch = kept(tmp_path, methods, grows_at=6, keep=2, every=5)
    (path,) = tmp_path.iterdir()
    assert path.name == "step_00000010.pt" and {a["step"] for a in watch.alerts()} == {10}
    other = Training(methods, rate=1.0)
    torch.manual_seed(77)
    before = torch.get_rng_state(), random.getstate()
    found = replay(path, other.model, [other.optimizer], other.step)
    steps = list(found.losses)
    assert steps[-1] == 10 and len(steps) >= 2
    for step, (then, now) in found.losses.items():
        assert then == now == training.losses[step]
    assert found.differences == {10: 0.0}
    assert {r["step"] for r in found.records} == set(steps)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    lines = "\n".join(found.lines())
    assert "largest logit" in lines and "the same bits" in lines and "max_logit blocks.0.attn head" in lines


def test_a_spike_of_the_loss_writes_its_file_between_two_readings(tmp_path):
    training = Training()
    watch = headwise.watch(
        training.model, every=30, on_alert=None, statistics=["max_logit", "gradient_spike"], keep=5, keep_in=tmp_path
    )
    for step in range(62):
        batch = torch.randint(len(EXAMPLES), (4,)).tolist()
        loss = training.step(batch)
        watch.step(loss + 20 * (step == 61), batch=batch)
    assert [(one["alert"], one["step"]) for one in watch.alerts()] == [("loss_spike", 61)]
    other = Training()
    found = replay(tmp_path / "step_00000061.pt", other.model, [other.optimizer], other.step)
    # the gradient's deviation is told from more steps than were kept
    assert found.differences == {60: 0.0}
    lines = list(found.lines())
    assert lines[0].startswith("step 61: the loss rose") and lines[1] == "step | loss then | loss now"


def test_a_file_holds_at_least_so_many_steps_and_readings_and_at_most_twice_as_many(tmp_path):
    _, watch = kept(tmp_path, keep=4, grows_at=12)
    (path,) = tmp_path.iterdir()
    file = read_replay(path)
    steps = [entry["step"] for entry in file["steps"]]
    assert steps == list(range(steps[0], 13)) and 4 <= len(steps) <= 8
    assert file["state"]["step"] == steps[0]
    assert sorted({record["step"] for record in file["readings"]}) == [6, 8, 10, 12]
    assert file["alerts"] == [alert for alert in watch.alerts() if alert["step"] == 12]


def test_an_alert_in_the_first_steps_is_replayed_from_the_beginning(tmp_path):
    training, _ = kept(tmp_path, keep=50, grows_at=0, steps=3)
    file = read_replay(tmp_path / "step_00000000.pt")
    assert [entry["step"] for entry in file["steps"]] == [0] and not file["state"]["optimizers"]
    assert training.losses


def test_keeping_changes_no_bit_of_a_training(tmp_path):
    found = []
    for keep in (None, 2):
        torch.manual_seed(5)
        random.seed(5)
        training = Training()
        settings = {} if keep is None else {"keep": keep, "keep_in": tmp_path}
        watch = headwise.watch(training.model, every=2, on_alert=None, statistics=NAMES, **settings)
        training.run(watch, 6)
        found.append(training.losses)
    assert found[0] == found[1]


def test_a_step_without_its_batch_is_refused(tmp_path):
    training = Training()
    watch = headwise.watch(training.model, on_alert=None, statistics=NAMES, keep=2, keep_in=tmp_path)
    training.step([1, 2])
    with pytest.raises(ValueError, match=r"watch.step\(batch=ids\)"):
        watch.step()
    with pytest.raises(TypeError, match=r"names the examples of a step by numbers, texts or tensors.*got object"):
        watch.step(batch=object())
    with pytest.raises(ValueError, match="at least 1, got 0"):
        headwise.watch(fresh(HOSTS["own"]), keep=0)


def test_what_is_no_replay_file_or_another_model_is_refused(tmp_path):
    kept(tmp_path, keep=2)
    (path,) = tmp_path.iterdir()
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    with pytest.raises(ValueError, match="is of another model, pass the model"):
        replay(path, other, [], print)
    training = Training((headwise.DropHead(p=0.1),))
    with pytest.raises(ValueError, match="was not regularized, and this one differs"):
        replay(path, training.model, [training.optimizer], training.step)
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match="is not a replay file"):
        read_replay(tmp_path / "text.pt")
    with pytest.raises(ValueError, match="there is no file"):
        read_replay(tmp_path / "none.pt")


SCRIPT = """
import torch
import headwise

torch.manual_seed(0)
EXAMPLES = torch.randn(40, 6, 16)


def build():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(batch):
        optimizer.zero_grad()
        loss = (model(EXAMPLES[batch]) - EXAMPLES[batch].roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


RATE = 0.1
if __name__ == "__main__":
    model, optimizer, step = build()
    limits = headwise.Thresholds(max_logit=0.5)
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["max_logit"], keep=3, thresholds=limits)
    for number in range(4):
        batch = torch.randint(40, (4,)).tolist()
        watch.step(step(batch), batch=batch)
"""


@pytest.mark.grid
def test_the_command_runs_the_steps_again_and_shows_the_readings(tmp_path):
    (tmp_path / "training.py").write_text(textwrap.dedent(SCRIPT))
    subprocess.run([sys.executable, "training.py"], cwd=tmp_path, check=True, timeout=300)
    file = next((tmp_path / "replays").iterdir())
    command = [sys.executable, "-m", "headwise", "replay", str(file)]
    ran = subprocess.run([*command, "training.py:build"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert (
        "the largest logit of" in ran.stdout and "the same bits" in ran.stdout and "loss then | loss now" in ran.stdout
    )
    wrong = subprocess.run([*command, "training.py:buidl"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 1 and "has no function 'buidl'. Did you mean 'build'?" in wrong.stderr
