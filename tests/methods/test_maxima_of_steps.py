"""QKClip's maxima are those of the forwards whose loss a step descends: skipped and failed batches leave none."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from methods.weight_hosts import ids, loss_of, model
from torch.utils.checkpoint import checkpoint

import headwise

THRESHOLD = 0.02


def batch(kind: str, net: torch.nn.Module, seed: int, kept: list) -> None:
    """Run a batch in one of the ways in which loops do."""
    loud = net.get_submodule("embedding").register_forward_hook(lambda *args: 3 * args[-1]) if kind != "go" else None
    if kind == "go":
        loss_of(net, ids(seed=seed)).backward()
    elif kind == "skipped":
        loss_of(net, ids(seed=seed))
    elif kind == "skipped and kept":
        kept.append(loss_of(net, ids(seed=seed)))
    elif kind == "without gradients":
        with torch.no_grad():
            net(ids(seed=seed))
    elif kind == "failed":
        bomb = net.get_submodule("layers.1").register_forward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            net(ids(seed=seed))
        bomb.remove()
    elif kind == "aside":
        with headwise.handle(net).aside():
            loss_of(net, ids(seed=seed))
    if loud is not None:
        loud.remove()


def trained(*steps: list[tuple[str, int]], compiled: bool = False) -> list[torch.Tensor]:
    """Train over batches of these kinds and seeds, and return the parameters."""
    net, kept = model(), []
    headwise.regularize(net, headwise.QKClip(threshold=THRESHOLD))
    if compiled:
        for layer in net.layers:
            layer.compile(backend="aot_eager")
    for step in steps:
        for kind, seed in step:
            batch(kind, net, seed, kept)
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        net.zero_grad()
        headwise.handle(net).after_step()
    return list(net.parameters())


def same(one, other) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


KINDS = ["skipped", "skipped and kept", "without gradients", "failed"]
# a compiled layer runs no hook of a test
CASES = [(kind, how) for how in ("eager", "compiled layers") for kind in (KINDS if how == "eager" else KINDS[:3])]


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_a_batch_without_a_step_clips_nothing(kind, how):
    compiled = how != "eager"
    plain = trained([("go", 0)], [("go", 1)], compiled=compiled)
    assert same(plain, trained([("go", 0)], [(kind, 7), ("go", 1)], compiled=compiled))
    assert same(plain, trained([(kind, 7), (kind, 8), ("go", 0)], [(kind, 9), ("go", 1)], compiled=compiled))


@pytest.mark.parametrize("kind", ["skipped", "without gradients", "aside"])
def test_batches_between_accumulated_ones_clip_nothing(kind):
    plain = trained([("go", 0), ("go", 1), ("go", 2)])
    assert same(plain, trained([("go", 0), (kind, 7), ("go", 1), (kind, 8), (kind, 9), ("go", 2)]))


def clipping() -> tuple[torch.nn.Module, headwise.Regularized]:
    net = model()
    return net, headwise.regularize(net, headwise.QKClip(threshold=THRESHOLD))


def maxima(handle: headwise.Regularized) -> torch.Tensor:
    return torch.stack([f.states[0].tensor("largest").clone() for f in handle.fitted])


def alone(seed: int) -> torch.Tensor:
    """Return the maxima of one batch of the initial model."""
    net, handle = clipping()
    net(ids(seed=seed))
    return maxima(handle)


def test_all_accumulated_batches_and_all_forwards_of_one_loss_count():
    each = [alone(seed) for seed in range(3)]
    largest = torch.stack(each).amax(0)
    assert not any(torch.equal(largest, one) for one in each)
    net, handle = clipping()
    for seed in range(3):
        net(ids(seed=seed)).mean().backward()
    handle._maxima.settle(handle.fitted)
    assert torch.equal(maxima(handle), largest)
    net, handle = clipping()
    sum(net(ids(seed=seed)).mean() for seed in range(3)).backward()
    handle._maxima.settle(handle.fitted)
    assert torch.equal(maxima(handle), largest)


def test_a_checkpointed_batch_counts_and_a_skipped_one_does_not():
    net, handle = clipping()
    for seed in (0, 2):
        out = checkpoint(net, ids(seed=seed), use_reentrant=False)
    out.mean().backward()
    handle._maxima.settle(handle.fitted)
    assert torch.equal(maxima(handle), alone(2))


def test_skipped_batches_take_no_memory_and_copies_start_anew():
    net, handle = clipping()
    for seed in range(5):
        loss_of(net, ids(seed=seed))
    assert handle._maxima._aside == []
    for seed in range(5):
        loss_of(net, ids(seed=seed)).backward()
    assert len(handle._maxima._aside) == 1
    assert copy.deepcopy(handle)._maxima._aside == []


def test_functions_that_are_differentiated_elsewhere_still_count():
    # torch.func and compiled models show no backward
    net, handle = clipping()
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        loss_of(fast, ids(seed=seed)).backward()
    before = [p.detach().clone() for p in net.parameters()]
    handle.after_step()
    assert not same(before, net.parameters())
