"""A penalty belongs to the step whose loss its forward leads to, in loops that skip, fail, repeat and alternate."""

from __future__ import annotations

import pytest
import torch
from methods.weight_hosts import ids, loss_of, model
from torch.utils.checkpoint import checkpoint

import headwise


def fitted(strength: float = 1.0):
    net = model()
    return net, headwise.regularize(net, headwise.EntropyPenalty(strength=strength))


def penalty_of(*batches) -> float:
    """Return the penalty that one loss has of these batches."""
    net, handle = fitted()
    losses = [loss_of(net, batch) for batch in batches]
    penalty = handle.loss()
    assert len(losses) == len(batches)
    return penalty.item()


def test_a_skipped_batch_leaves_nothing_to_the_next_step():
    net, handle = fitted()
    for seed, skipped in ((1, True), (2, True), (0, False)):
        loss = loss_of(net, ids(seed=seed))
        if skipped:
            continue
        penalty = handle.loss()
        (loss + penalty).backward()
    assert penalty.item() == pytest.approx(penalty_of(ids(seed=0)))


def test_a_batch_whose_loss_is_not_finite_leaves_the_weights_finite():
    net, handle = fitted()
    embedding = net.embedding.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(4):
        with torch.no_grad():
            net.embedding.weight.copy_(embedding * float("nan") if step == 1 else embedding)
        loss = loss_of(net, ids(seed=step))
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        (loss + handle.loss()).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in net.parameters())


@pytest.mark.parametrize("retried_inside", [False, True])
def test_a_forward_that_fails_keeps_no_penalty_and_no_graph(retried_inside):
    net, handle = fitted()

    def bomb(*_):
        raise RuntimeError("CUDA out of memory.")

    hook = net.layers[1].register_forward_hook(bomb)
    try:
        loss_of(net, ids(batch=4))
    except RuntimeError:
        assert len(handle.shared.penalties) == 0
        hook.remove()
        if retried_inside:
            loss = loss_of(net, ids())
    if not retried_inside:
        loss = loss_of(net, ids())
    penalty = handle.loss()
    (loss + penalty).backward()
    assert penalty.item() == pytest.approx(penalty_of(ids()))


def test_a_failed_forward_takes_nothing_from_one_before_it():
    net, handle = fitted()
    loss = loss_of(net, ids())
    hook = net.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, ids(seed=3))
    hook.remove()
    penalty = handle.loss()
    (loss + penalty).backward()
    assert penalty.item() == pytest.approx(penalty_of(ids()))


def test_two_forwards_of_one_loss_both_count():
    net, handle = fitted()
    # like the chosen and the rejected answers of DPO; only numbers made of the outputs are kept
    chosen, rejected = net(ids(seed=1)).mean(), net(ids(seed=2)).mean()
    penalty = handle.loss()
    (chosen - rejected + penalty).backward()
    alone = penalty_of(ids(seed=1)) + penalty_of(ids(seed=2))
    assert penalty.item() == pytest.approx(alone)
    net, handle = fitted()
    outputs = [net(ids(seed=seed)) for seed in (1, 2)]
    assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=1), ids(seed=2)))
    assert len(outputs) == 2


def test_accumulated_batches_whose_loss_is_read_once_all_count():
    net, handle = fitted()
    total = sum(loss_of(net, ids(seed=seed)) for seed in range(3))
    assert handle.loss().item() == pytest.approx(penalty_of(*(ids(seed=seed) for seed in range(3))))
    assert total.requires_grad


def test_a_generators_step_leaves_nothing_to_the_discriminator():
    net, handle = fitted()
    input_of = torch.nn.Linear(24, 24)
    for _ in range(2):
        real, fake = loss_of(net, ids(seed=1)), loss_of(net, ids(seed=2))
        penalty = handle.loss()
        (real - fake + penalty).backward()
        # the generator's step: a backward goes through the discriminator, whose penalty nobody reads
        hook = net.embedding.register_forward_hook(lambda _, __, out: input_of(out))
        loss_of(net, ids(seed=3)).backward()
        hook.remove()
    assert penalty.item() == pytest.approx(penalty_of(ids(seed=1), ids(seed=2)))


def test_an_attack_on_the_inputs_leaves_nothing_and_a_gradient_penalty_stays():
    net, handle = fitted()
    for seed in range(2):
        torch.autograd.grad(loss_of(net, ids(seed=seed)), [net.embedding.weight])
    loss = loss_of(net, ids(seed=5))
    assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=5)))
    assert loss.requires_grad
    net, handle = fitted()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        inner = net(ids(seed=1)).mean()
        torch.autograd.grad(inner * 1.0, [net.norm.weight], create_graph=True)
        outer = loss_of(net, ids(seed=2))
    assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=1), ids(seed=2)))
    assert inner.requires_grad and outer.requires_grad


def test_a_penalty_read_after_the_backward_is_not_lost_in_silence():
    net, handle = fitted()
    loss_of(net, ids()).backward()
    penalty = handle.loss()
    assert penalty.item() == pytest.approx(penalty_of(ids()))
    with pytest.raises(RuntimeError, match="second time"):
        penalty.backward()


def test_a_checkpointed_model_counts_once_and_skips_too():
    net, handle = fitted()
    for seed in (1, 2):
        out = checkpoint(net, ids(seed=seed), use_reentrant=False)
    penalty = handle.loss()
    (out.mean() + penalty).backward()
    assert penalty.item() == pytest.approx(penalty_of(ids(seed=2)))
    assert len(handle.shared.penalties) == 0


def test_a_forward_whose_output_nobody_keeps_counts_if_it_was_the_last():
    net, handle = fitted()
    net(ids(seed=1))
    net(ids(seed=2))
    assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=2)))
