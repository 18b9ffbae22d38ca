"""The controls of the league's worlds do what they say, in every world."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from headwise_papers.league import small_tasks, tasks
from headwise_papers.league.contest_files import read_small_worlds
from headwise_papers.tasks.eight_bits import in_8_bits, rounded
from torch import nn
from torch.nn import functional as F

import headwise
from headwise.lab.training.phases import part_of

WORLDS = read_small_worlds([Path(str(resources.files("headwise_papers"))) / "league"])


@pytest.mark.parametrize("world", WORLDS)
def test_residual_dropout_stands_behind_every_branch_and_changes_no_weight(world):
    task = WORLDS[world].built()
    torch.manual_seed(0)
    plain = task.model()
    torch.manual_seed(0)
    dropped = type(task)(**task.model_dump() | {"residual_dropout": 0.5}).model()
    assert list(plain.state_dict()) == list(dropped.state_dict())
    assert all(map(torch.equal, plain.state_dict().values(), dropped.state_dict().values()))
    branches = tasks.branches(dropped)
    attention = [
        name for name, _ in dropped.named_modules() if name.rpartition(".")[2] in ("attn", "self_attn")
    ] or branches
    assert len(branches) >= len(attention) >= 2 and not any(branch._forward_hooks for branch in tasks.branches(plain))
    assert all(branch._forward_hooks for branch in branches)


def test_dropped_branches_are_scaled_so_that_their_mean_stays():
    branch, given = nn.Identity(), torch.ones(200, 200)
    branch.register_forward_hook(tasks.Dropped(0.25))
    found = branch(given)
    assert found.mean().item() == pytest.approx(1, abs=0.02) and found.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(branch.eval()(given), given)


def test_a_model_without_known_branches_is_refused():
    with pytest.raises(ValueError, match="finds no branch in Linear"):
        tasks.branches(nn.Linear(2, 2))


def test_label_smoothing_is_torchs_and_only_in_training():
    task = small_tasks.SmallDigits(label_smoothing=0.2)
    output, targets = torch.randn(12, 10, requires_grad=True), torch.randint(10, (12,))
    torch.testing.assert_close(task.loss(output, targets), F.cross_entropy(output, targets, label_smoothing=0.2))
    with torch.no_grad():
        torch.testing.assert_close(task.loss(output, targets), F.cross_entropy(output, targets))


@pytest.mark.parametrize("what", ["epochs", "steps"])
def test_stopping_early_shortens_the_run_and_its_schedule_once(what):
    task = small_tasks.SmallDigits(**({"steps": 8} if what == "steps" else {"epochs": 8}))
    early = type(task)(**task.model_dump() | {"stop_at": 0.5})
    part = part_of(early, 0)
    assert getattr(part.task, what) == getattr(task, what) // 2 == 4 and part.total == 1
    # the task of the part is not cut again
    assert not part.task.phases()[0].changes and not part_of(task, 0).phase.changes


def test_controls_at_their_defaults_change_nothing():
    for world in WORLDS.values():
        task = world.built()
        assert (task.residual_dropout, task.label_smoothing, task.stop_at, task.augmentation) == (0, 0, 1, 0)


def test_weights_of_8_bits_reach_reparametrized_ones_and_torchs_attention_and_leave_no_trace():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    headwise.regularize(model, headwise.SigmaReparam())
    x = torch.randn(2, 5, 16)
    before, plain, kept = model(x), rounded(model.self_attn.in_proj_weight), dict(model.state_dict())
    kept = {name: tensor.clone() for name, tensor in kept.items()}
    with in_8_bits(model):
        assert torch.equal(model.self_attn.in_proj_weight, plain)
        assert torch.equal(model.linear1.weight, rounded(kept["linear1.weight"]))
        assert 0 < (model(x) - before).abs().max() < 0.2
    assert torch.equal(model(x), before)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
