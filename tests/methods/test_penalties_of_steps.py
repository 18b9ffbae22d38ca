"""A penalty belongs to the step whose loss its forward leads to, in loops that skip, fail, repeat and alternate."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
from methods.weight_hosts import ids, loss_of, model
from torch.utils.checkpoint import checkpoint

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY


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


class Wrapped(torch.nn.Module):
    """Returns what `outputs` makes of the hidden states and the output of a model."""

    def __init__(self, outputs) -> None:
        super().__init__()
        self.net, self.outputs = model(), outputs

    def forward(self, batch):
        hidden = [self.net.embedding(batch)]
        for layer in self.net.layers:
            hidden.append(hidden[-1] + layer(hidden[-1]))
        return self.outputs(hidden, self.net.head(self.net.norm(hidden[-1])))


class Own:
    """An output of which torch knows nothing."""

    def __init__(self, hidden, out) -> None:
        self.hidden, self.out = hidden, out


OUTPUTS = {
    "a tensor": lambda _, out: out,
    "hidden states too": lambda hidden, out: (*hidden, out),
    "an object": Own,
    "a generator": lambda hidden, out: iter([hidden, out]),
}


def entropies(net: torch.nn.Module) -> headwise.Regularized:
    return headwise.regularize(net, headwise.EntropyPenalty(strength=1.0))


# A compiled layer is one node: what it leads to is known by the containers alone that torch knows.
CASES = [
    (layers, outputs)
    for layers in ("eager", "compiled")
    for outputs in list(OUTPUTS)[: 2 if layers == "compiled" else 4]
]


@pytest.mark.parametrize(("layers", "outputs"), CASES)
def test_a_skipped_batch_leaves_nothing_whatever_the_model_returns(layers, outputs):
    net = Wrapped(OUTPUTS[outputs])
    handle = entropies(net)
    if layers == "compiled":
        for layer in net.net.layers:
            layer.compile(backend="aot_eager")
    for seed in (1, 2, 0):
        out = net(ids(seed=seed))
        if seed:
            continue
    assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=0)))
    kept = [net(ids(seed=seed)) for seed in (1, 2)]
    assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=1), ids(seed=2)))
    del out, kept


def test_a_skipped_batch_of_parts_that_are_called_apart_leaves_nothing():
    net, handle = fitted()

    def parts(seed):
        x = net.embedding(ids(seed=seed))
        for layer in net.layers:
            x = x + layer(x)
        return net.head(net.norm(x)).mean()

    for seed in (1, 2, 0):
        out = parts(seed)
        if seed:
            continue
    penalty = handle.loss()
    assert penalty.item() == pytest.approx(penalty_of(ids(seed=0)))
    (out + penalty).backward()
    both = parts(1) - parts(2)
    assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=1), ids(seed=2)))
    assert both.requires_grad


def test_an_interrupted_forward_leaves_nothing_though_its_frames_are_kept():
    net, handle = fitted()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = net.head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        loss_of(net, ids(seed=1))
    hook.remove()
    loss = loss_of(net, ids())
    assert handle.loss().item() == pytest.approx(penalty_of(ids()))
    # as an interactive session keeps it in sys.last_value
    assert kept.tb is not None and loss.requires_grad


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_part_that_fails_leaves_nothing(error):
    net, handle = fitted()
    hidden = net.layers[0](net.embedding(ids(seed=1)))
    hook = net.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error()))
    with contextlib.suppress(error):
        net.layers[1](hidden)
    hook.remove()
    hidden = net.layers[0](net.embedding(ids()))
    hidden = net.layers[1](hidden)
    penalty = handle.loss()
    twin, other = fitted()
    out = twin.layers[1](twin.layers[0](twin.embedding(ids())))
    assert penalty.item() == pytest.approx(other.loss().item())
    assert out.requires_grad and hidden.requires_grad


def test_a_model_that_calls_itself_is_one_forward():
    class Twice(Wrapped):
        def forward(self, batch, again=True):
            first = self(batch, again=False) if again else 0.0
            return super().forward(batch) + first

    net = Twice(lambda _, out: out)
    handle = entropies(net)
    outs = [net(ids(seed=seed)) for seed in (1, 2)]
    assert handle.loss().item() == pytest.approx(2 * penalty_of(ids(seed=1), ids(seed=2)))
    assert len(outs) == 2


def test_a_compiled_model_skips_batches_that_are_not_finite():
    net, handle = fitted()
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    for seed in (1, 2, 0):
        hook_free = net.embedding.weight.detach().clone()
        with torch.no_grad():
            net.embedding.weight.mul_(float("nan") if seed else 1.0)
        loss = loss_of(fast, ids(seed=seed))
        with torch.no_grad():
            net.embedding.weight.copy_(hook_free)
        if not torch.isfinite(loss):
            continue
        penalty = handle.loss()
    assert penalty.item() == pytest.approx(penalty_of(ids(seed=0)))
    both = loss_of(fast, ids(seed=1)) + loss_of(fast, ids(seed=2))
    with pytest.warns(UserWarning, match="penalties of 2 training forwards of a model that is compiled as a whole"):
        assert handle.loss().item() == pytest.approx(penalty_of(ids(seed=1), ids(seed=2)))
    assert both.requires_grad


def test_a_compiled_model_warns_once_that_a_skipped_batch_may_count():
    net, handle = fitted()
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    loss_of(fast, ids(seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.loss()  # one forward, one loss
    for seed in (1, 2):
        loss_of(fast, ids(seed=seed))
    with pytest.warns(UserWarning, match="read loss\\(\\) before it decides to skip a batch") as told:
        handle.loss()
    assert told[0].filename == __file__
    for seed in (1, 2):
        loss_of(fast, ids(seed=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.loss()


def test_a_compiled_models_last_penalty_is_told_though_it_is_not_finite():
    net, handle = fitted()
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        net.embedding.weight.mul_(float("nan"))
    loss_of(fast, ids())
    assert handle.loss().isnan()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_model_can_be_copied_between_its_forward_and_its_loss(copied):
    net, handle = fitted()
    loss = loss_of(net, ids(seed=1))
    twin = copied(net)
    penalty = handle.loss()
    (loss + penalty).backward()
    assert penalty.item() == pytest.approx(penalty_of(ids(seed=1)))
    other = loss_of(twin, ids(seed=2))
    assert headwise.handle(twin).loss().item() == pytest.approx(penalty_of(ids(seed=2)))
    assert other.requires_grad


@pytest.mark.parametrize("form", ["fused", "matrix"])
@pytest.mark.parametrize("name", [name for name in shelf.__all__ if REGISTRY[name].penalizes])
def test_no_penalty_holds_the_output_of_its_own_call(name, form):
    net = model()
    methods = [REGISTRY[name](), *([headwise.SoftCap(cap=1e5)] if form == "matrix" else [])]
    handle = headwise.regularize(net, *methods)
    loss = loss_of(net, ids())
    entries = handle.shared.penalties.entries
    assert not any(e.abandoned for e in entries)
    del loss
    while entries:
        assert entries.pop().abandoned
