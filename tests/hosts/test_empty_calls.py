"""Batches without rows or tokens, and cross attention to no keys: methods behave there as the plain model does."""

from __future__ import annotations

from math import isfinite

import pytest
import torch
import torch.nn.functional as F
from grids import part_of_grid
from small_models import Encoder, Host, vectors
from torch import nn

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

NAMES = list(shelf.__all__)
# one of each kind: draws, penalizes, norms, learns, keeps averages, carries values, computes weights
SOME = (
    "DropHead",
    "EntropyPenalty",
    "Decorrelation",
    "GatedOutput",
    "ReAttention",
    "NeuTRENO",
    "SigmaReparam",
    "QKClip",
)


class Separate(nn.Module):
    """A projection each for q, k and v, whose shapes torch can tell without tokens."""

    def __init__(self, causal):
        super().__init__()
        self.num_heads, self.causal = 4, causal
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Separate(causal) for _ in range(2)), nn.Linear(32, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 48, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x, memory):
        return self.decoder(x, memory)


def two():
    return (*vectors()[0], vectors(tokens=7)[0][0] + 1), {}


HOSTS = {
    "own": Host(Stack, vectors),
    "own-causal": Host(lambda: Stack(True), vectors),
    "torch": Host(Encoder, vectors),
    "torch-dropout": Host(lambda: Encoder(0.1), vectors),
    "torch-across": Host(Decoder, two),
}


def empties(host):
    """Return the host's batch without rows, without tokens, and without keys to attend to."""
    args, _ = host.batch()
    found = [tuple(x[:0] for x in args), tuple(x[:, :0] for x in args)]
    return found + ([(args[0], args[1][:, :0])] if host is HOSTS["torch-across"] else [])


def plain_model(host):
    torch.manual_seed(0)
    return host.make().train()


def fitted(name, host):
    """Return a model with the method where it applies, or None."""
    net, cls = plain_model(host), REGISTRY[name]
    methods = cls(**(cls.strong if cls.strong else {}))
    try:
        return net, headwise.regularize(net, methods, example=host.example())
    except ValueError as refused:
        # a method for other layers, not a failure
        assert "not applicable" in str(refused)
        return None


CASES = [(name, host) for name in NAMES for host in HOSTS]


@pytest.mark.parametrize(("name", "host"), part_of_grid(CASES, [(name, host) for name in SOME for host in HOSTS]))
def test_nothing_enters_a_layer_as_it_does_without_methods(name, host):
    host = HOSTS[host]
    for batch in empties(host):
        found = fitted(name, host)
        if found is None:
            return
        net, handle = found
        host.run(net)
        full = len(handle.shared.penalties.take())
        want = host.run(plain_model(host), (batch, {}))

        out = host.run(net, (batch, {}))
        assert out.shape == want.shape and out.isfinite().all()
        # processes with other batches add as many penalties
        assert len(handle.shared.penalties) == full
        penalty = handle.loss()
        assert penalty.isfinite()
        (out.sum() + penalty).backward()
        for key, parameter in net.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), key
            # data parallelism waits for it
            assert parameter.grad is not None or ".headwise." not in key, key
        handle.after_step()
        net.eval()
        assert host.run(net, (batch, {})).shape == want.shape
        net.train()
        assert host.run(net).isfinite().all()


def test_averages_over_batches_leave_an_empty_one_out():
    net, _ = fitted("ReAttention", HOSTS["torch"])
    HOSTS["torch"].run(net)
    before = [value.clone() for value in net.buffers()]
    for batch in empties(HOSTS["torch"]):
        HOSTS["torch"].run(net, (batch, {}))
    assert before and all(torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("first", [True, False])
def test_a_watch_reads_what_is_there(host, first):
    host = HOSTS[host]
    for batch in empties(host):
        net = plain_model(host)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        watch = headwise.watch(net, every=1, on_alert="raise")
        full = host.batch()
        for step in [(batch, {}), full] if first else [full, (batch, {}), full]:
            optimizer.zero_grad()
            loss = host.run(net, step).sum()
            loss.backward()
            optimizer.step()
            watch.step(loss)
        sites = {one["site"] for one in watch.records() if one["head"] is not None}
        assert len(sites) == len([m for m in net.modules() if isinstance(m, Separate | nn.MultiheadAttention)])
        assert all(isfinite(one["value"]) for one in watch.records())
        watch.remove()
