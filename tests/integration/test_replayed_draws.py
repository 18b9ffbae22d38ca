"""Draws that follow torch's generators repeat where a library restores the random state and runs a batch again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from methods.weight_hosts import ids, model
from small_models import HOSTS, fresh
from torch import nn
from torch.utils.checkpoint import checkpoint

import headwise
from headwise import DropAttention, DropHead, DropKey, EntropyPenalty, InputNoise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

STRONG = [REGISTRY[name](**REGISTRY[name].strong) for name in shelf.__all__]
DRAWING = [method for method in STRONG if method.draws() and not method.penalizes]
CHUNKS = [ids(batch=4, seed=seed) for seed in range(4)]


class Dropping(nn.Module):
    """The model with dropout around its attention, which moves torch's generator."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.net, self.dropout = model(), nn.Dropout(p)

    def forward(self, batch):
        x = self.dropout(self.net.embedding(batch))
        for layer in self.net.layers:
            x = x + self.dropout(layer(x))
        return self.net.norm(x).mean(1)


def contrast(embeddings):
    first, second = F.normalize(embeddings, dim=1).chunk(2)
    return F.cross_entropy(first @ second.T * 20, torch.arange(len(first)))


def gradient(net):
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def exact(net):
    """The gradient of one loss over all chunks."""
    torch.manual_seed(5)
    net.zero_grad()
    contrast(torch.cat([net(chunk) for chunk in CHUNKS])).backward()
    return gradient(net)


def embedded(net):
    states, embeddings = [], []
    for chunk in CHUNKS:
        states.append(torch.get_rng_state())
        with torch.no_grad():
            embeddings.append(net(chunk))
    return states, torch.cat(embeddings).requires_grad_()


def replay(net, states, grads):
    for chunk, state, grad in zip(CHUNKS, states, grads.chunk(len(CHUNKS)), strict=True):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(state)
            (net(chunk) * grad).sum().backward()


def cached(net):
    """The same gradient with the graph of one chunk at a time, as GradCache computes it."""
    torch.manual_seed(5)
    net.zero_grad()
    states, embeddings = embedded(net)
    contrast(embeddings).backward()
    replay(net, states, embeddings.grad)
    return gradient(net)


def cached_in_a_hook(net):
    """The same inside a hook of the backward, as sentence-transformers computes it."""
    torch.manual_seed(5)
    net.zero_grad()
    states, embeddings = embedded(net)
    loss = contrast(embeddings)
    (grads,) = torch.autograd.grad(loss, [embeddings])
    loss = loss.detach().requires_grad_()
    loss.register_hook(lambda scale: replay(net, states, grads * scale))
    loss.backward()
    return gradient(net)


@pytest.mark.parametrize("way", [cached, cached_in_a_hook])
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("method", DRAWING, ids=repr)
def test_cached_gradients_are_the_exact_ones(method, p, way):
    net = Dropping(p)
    headwise.regularize(net, method, draws="torch")
    torch.testing.assert_close(way(net), exact(net), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("host", HOSTS)
def test_every_host_may_run_again_inside_a_backward(host):
    net = fresh(HOSTS[host]).train()
    args, kwargs = HOSTS[host].batch()
    headwise.regularize(net, DropHead(p=0.5), draws="torch", example=kwargs or tuple(args))

    def run():
        torch.manual_seed(3)
        out = net(*args, **kwargs)
        return (out if isinstance(out, torch.Tensor) else out[0]).square().mean()

    run().backward()
    want = gradient(net).clone()
    net.zero_grad()
    outer = torch.zeros((), requires_grad=True)

    def again(_):
        with torch.enable_grad():
            run().backward()

    outer.register_hook(again)
    (outer * 1).backward()
    torch.testing.assert_close(gradient(net), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_by_default_a_replayed_batch_is_told_once(p):
    net = Dropping(p)
    handle = headwise.regularize(net, DropHead(p=0.5))
    with pytest.warns(UserWarning, match=r"GradCache .*DropHead\(p=0.5\) drew other numbers .*draws='torch'") as told:
        cached(net)
    assert len(told) == 1
    handle.after_step()
    # warnings are errors
    cached(net)


def test_one_chunk_alone_is_told_too():
    for p in (0.0, 0.2):
        net = Dropping(p)
        headwise.regularize(net, DropHead(p=0.5))
        state = torch.get_rng_state()
        with torch.no_grad():
            net(CHUNKS[0])
        torch.set_rng_state(state)
        with pytest.warns(UserWarning, match="draws='torch'"):
            net(CHUNKS[0][:])


def test_a_replay_inside_a_backward_names_the_remedy():
    net = Dropping(0.2)
    headwise.regularize(net, DropHead(p=0.5))
    with pytest.warns(UserWarning, match="GradCache"), pytest.raises(RuntimeError, match="draws='torch'"):
        cached_in_a_hook(net)


def test_a_penalty_inside_a_backward_is_refused():
    net = Dropping(0.2)
    headwise.regularize(net, DropHead(p=0.5), EntropyPenalty(strength=0.1), draws="torch")
    with pytest.raises(RuntimeError, match="EntropyPenalty"):
        cached_in_a_hook(net)


def test_other_loops_are_told_nothing():
    net = Dropping(0.2)
    handle = headwise.regularize(net, DropHead(p=0.5))
    for step in range(3):
        for chunk in CHUNKS:
            # as a memory bank, or a teacher in training mode
            with torch.no_grad():
                net(chunk)
            net(chunk).mean().backward()
        handle.after_step()
        torch.manual_seed(step)
    plain = Dropping(0.0)
    headwise.regularize(plain, DropHead(p=0.5))
    with torch.no_grad():
        plain(CHUNKS[0])
    plain(CHUNKS[1]).mean().backward()
    batch = ids(seed=7)
    with torch.no_grad():
        plain(batch)
    # the memory is that of the last batch, and its numbers are others
    batch.copy_(ids(seed=8))
    plain(batch).mean().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_repeat_draws_and_dropout(reentrant):
    class Checkpointed(Dropping):
        def forward(self, batch):
            x = self.dropout(self.net.embedding(batch))
            for layer in self.net.layers:
                x = checkpoint(self.block, layer, x, use_reentrant=reentrant)
            return self.net.norm(x).mean(1)

        def block(self, layer, x):
            return x + self.dropout(layer(x))

    methods = (InputNoise(scale=0.1), DropAttention(p=0.3), DropHead(p=0.5))
    plain, saving = Dropping(0.2), Checkpointed(0.2)
    for net in (plain, saving):
        headwise.regularize(net, *methods, draws="torch")
    torch.testing.assert_close(exact(saving), exact(plain), rtol=1e-4, atol=1e-6)


def test_a_compiled_model_follows_the_generator():
    net = Dropping(0.2)
    headwise.regularize(net, DropKey(p=0.3), draws="torch")
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(cached(fast), exact(fast), rtol=1e-4, atol=1e-6)


def drawn(net, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        return net.train()(CHUNKS[0])


def test_draws_follow_the_generator_and_the_seed():
    net = Dropping(0.0)
    headwise.regularize(net, DropHead(p=0.5), draws="torch")
    one = drawn(net)
    assert torch.equal(drawn(net), one)
    assert not torch.equal(drawn(net, seed=1), one)
    other = Dropping(0.0)
    headwise.regularize(other, DropHead(p=0.5), draws="torch", seed=1)
    assert not torch.equal(drawn(other), one)
    # also between the layers of a pass
    assert not torch.equal(net.net.layers[0](one[:, None]), net.net.layers[0](one[:, None]))


def test_only_layers_with_draws_take_numbers():
    net = Dropping(0.0)
    headwise.regularize(net, EntropyPenalty(strength=0.1), draws="torch")
    state = torch.get_rng_state()
    net(CHUNKS[0])
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        net.eval()(CHUNKS[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_follow_it_too(copied):
    net = Dropping(0.0)
    headwise.regularize(net, DropHead(p=0.5), draws="torch")
    assert torch.equal(drawn(copied(net)), drawn(net))


def test_what_draws_follow_is_saved_reported_and_checked(tmp_path):
    net = Dropping(0.0)
    handle = headwise.regularize(net, DropHead(p=0.5), draws="torch")
    assert "draws='torch'" in str(handle.report())
    want = drawn(net)
    again = Dropping(0.0)
    other = headwise.regularize(again, DropHead(p=0.5))
    assert "draws" not in str(other.report())
    with pytest.raises(ValueError, match=r"draws='torch'.*draws='counter'"):
        other.load_state(handle.state())
    # a state of an earlier version
    old = {name: value for name, value in other.state().items() if name != "draws"}
    other.load_state(old)
    with pytest.raises(ValueError, match=r"draws='counter'.*draws='torch'"):
        handle.load_state(old)
    handle.save_pretrained(tmp_path)
    loaded = Dropping(0.0)
    headwise.load_pretrained(loaded, tmp_path)
    assert torch.equal(drawn(loaded), want)


@pytest.mark.parametrize("wrong", ["Torch", None, 1])
def test_a_wrong_choice_is_refused(wrong):
    with pytest.raises(ValueError, match="draws must be one of 'counter', 'torch'"):
        headwise.regularize(Dropping(0.0), DropHead(p=0.5), draws=wrong)
