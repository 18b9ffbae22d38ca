"""The layers of a forward on a CPU draw their numbers together, with the bits that each has alone."""

import pytest
import torch
import weight_hosts
from torch.utils.checkpoint import checkpoint_sequential

import headwise
from headwise.attend.core import random_draws
from headwise.attend.core.random_draws import DrawnAhead
from headwise.attend.methods.text import parse

METHODS = [
    "DropHead(p=0.4)",
    "BranchDrop(p=0.4)",
    "DropColumn(p=0.4) + DropHead(p=0.4)",
    "DropKey(unit='column', p=0.4)",
    "InputNoise(scale=0.3)",
    "EntropyPenalty(strength=1.0, rows=3)",
]


class Blocks(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(*(weight_hosts.Attention() for _ in range(4)))


def steps(method, *, draws="counter", checkpointed=False):
    """Return the results and gradients of three steps, and the state of torch's generator after them."""
    model, found = Blocks(), []
    handle = headwise.regularize(model, *parse(method), draws=draws)
    x = torch.randn(3, 7, weight_hosts.WIDTH, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        # A region runs again in backward, where no forward of the model runs.
        y = checkpoint_sequential(model, 2, x, use_reentrant=False) if checkpointed and step == 1 else model(x)
        (y.square().mean() + handle.loss()).backward()
        handle.after_step()
        found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return [*found, torch.get_rng_state()]


def alone(monkeypatch):
    monkeypatch.setattr(DrawnAhead, "MOST", -1)


@pytest.mark.parametrize("settings", [{}, {"checkpointed": True}, {"draws": "torch"}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_draw_together_draw_the_bits_that_each_draws_alone(method, settings, monkeypatch):
    together = steps(method, **settings)
    alone(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(together, steps(method, **settings), strict=True))


def hashed(monkeypatch, run):
    """Return how often positions are hashed in a run."""
    calls, plain = [], random_draws._hashed
    with monkeypatch.context() as patch:
        patch.setattr(random_draws, "_hashed", lambda *inputs: [calls.append(1), plain(*inputs)][1])
        run()
    return len(calls)


def test_one_draw_serves_the_layers_of_a_forward(monkeypatch):
    assert hashed(monkeypatch, lambda: steps("DropHead(p=0.4)")) == 3
    alone(monkeypatch)
    assert hashed(monkeypatch, lambda: steps("DropHead(p=0.4)")) == 12


def test_many_numbers_are_drawn_layer_by_layer(monkeypatch):
    monkeypatch.setattr(DrawnAhead, "MOST", 8)
    assert hashed(monkeypatch, lambda: steps("DropHead(p=0.4)")) == 12


def test_what_a_method_writes_into_its_numbers_changes_no_others():
    ahead = DrawnAhead(lambda: [5, 6])
    first, second = ahead.take(4, 1, (2, 3)), ahead.take(5, 1, (2, 3))
    x = torch.ones(2, 3, requires_grad=True)
    loss = (x * second).sum()
    first.zero_()
    loss.backward()
    assert torch.equal(x.grad, random_draws._numbers(5, 1, (2, 3), torch.device("cpu")))


def test_a_pass_that_was_not_foreseen_draws_alone():
    ahead = DrawnAhead(lambda: [5])
    ahead.take(4, 1, (2,))
    assert ahead.take(7, 1, (2,)) is None
    # handed out once: what a repeated pass draws must not be what the first one may have changed
    assert ahead.take(5, 1, (2,)) is not None and ahead.take(5, 1, (2,)) is None


def test_a_forward_that_ended_serves_no_later_draw():
    steps("DropHead(p=0.4)")
    assert random_draws._drawing.ahead is None
