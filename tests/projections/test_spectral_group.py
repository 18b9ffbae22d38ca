"""The weights of all layers computed together: the numbers, gradients and vectors of each computed alone."""

from __future__ import annotations

import copy

import pytest
import torch
from methods.weight_hosts import ids, loss_of, model
from small_models import _llama
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headwise
from headwise import QKClip, SigmaReparam, SpectralNorm, WeightNorm
from headwise.attend.methods.reparametrization import reparametrize
from headwise.attend.projections import spectral_group
from headwise.attend.projections import together as together_
from headwise.attend.projections.block import Block
from headwise.attend.projections.leading import unit
from headwise.attend.projections.spectral import Spectral

METHODS = [SigmaReparam(), SigmaReparam(init="one"), SpectralNorm()]


@pytest.fixture(autouse=True)
def together(monkeypatch):
    """Compute together on CPUs too, as on CUDA, and count the groups."""
    monkeypatch.setattr(together_, "TOGETHER_ON", ("cpu",))
    computed, compute = [], spectral_group.SpectralGroup.compute
    monkeypatch.setattr(
        spectral_group.SpectralGroup,
        "compute",
        lambda self, weights: computed.append(len(weights)) or compute(self, weights),
    )
    return computed


def fused():
    return model(), lambda net, seed: loss_of(net, ids(seed=seed))


NO_DROPOUT = {f"{place}_pdrop": 0.0 for place in ("resid", "embd", "attn")}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3, **NO_DROPOUT)
    return GPT2LMHeadModel(config)


def of_transformers(make):
    torch.manual_seed(0)
    net = make()

    def loss(net, seed):
        tokens = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(seed))
        return net(tokens).logits.square().mean()

    return net, loss


HOSTS = {
    "one matrix of q, k, v": fused,
    "Conv1D": lambda: of_transformers(gpt2),
    "grouped heads": lambda: of_transformers(_llama),
}


def plain_forward(spectral, weight):
    """The form of one layer, written out block by block."""
    full, sigmas = weight, []
    for kind, matrix in zip(spectral.kinds, spectral._matrices(weight), strict=True):
        u, v = (unit(getattr(spectral, f"{name}_{kind}").to(matrix.dtype)) for name in "uv")
        sigmas.append(torch.dot(u, matrix @ v))
    sigma = torch.stack(sigmas)
    ratio = 1 / sigma if spectral.gamma is None else spectral.gamma / sigma
    shape = [1] * full.dim()
    shape[spectral.axis] = -1
    return full * ratio[spectral.owner].view(shape)


def plain_iteration(spectral, weight):
    for kind, matrix in zip(spectral.kinds, spectral._matrices(weight.detach()), strict=True):
        u, v = getattr(spectral, f"u_{kind}"), getattr(spectral, f"v_{kind}")
        u.copy_(unit(matrix @ v))
        v.copy_(unit(matrix.t() @ u))


class Alone(nn.Module):
    """A parametrization with the state of another one and the written-out form."""

    def __init__(self, spectral):
        super().__init__()
        self.spectral = spectral

    def forward(self, weight):
        return plain_forward(self.spectral, weight)


def chains(net):
    return [m for m in net.modules() if isinstance(m, nn.utils.parametrize.ParametrizationList)]


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("host", HOSTS)
def test_fifteen_steps_are_those_of_each_layer_alone(host, method, together):
    net, loss = HOSTS[host]()
    net = net.double()
    handle = headwise.regularize(net, method)
    twin = copy.deepcopy(net)
    for chain in chains(net):
        # else the copy's vectors follow its own weights with each step of the first
        chain[0]._copies.clear()
    for chain in chains(twin):
        chain[0] = Alone(chain[0])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (net, twin)]
    for step in range(15):
        together.clear()
        losses = [loss(one, step) for one in (net, twin)]
        # queries and outputs, and keys and values, of grouped heads have separate sizes
        assert sum(together) == len(chains(net)) and len(together) == (2 if host == "grouped heads" else 1)
        for value, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        handle.after_step()
        headwise.handle(twin).after_step()
        with torch.no_grad():
            for chain in chains(twin):
                plain_iteration(chain[0].spectral, chain.original)
        # Adam divides by the size of a gradient, and spreads its rounding.
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
        for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gradients_are_those_of_operators_and_so_are_second_derivatives(method):
    net = fused()[0].double()
    headwise.regularize(net, method)
    chain = chains(net)[0]
    # a weight that has moved since its vectors were found
    with torch.no_grad():
        chain.original += 0.05 * torch.randn_like(chain.original)
    inputs = [p for p in (chain.original, chain[0].gamma) if p is not None]
    upstream = torch.randn_like(chain.original)
    found = []
    for made in (chain[0](chain.original), plain_forward(chain[0], chain.original)):
        first = torch.autograd.grad(made, inputs, upstream, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found.append([made, *first, *second])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def gradients(net, run):
    net.zero_grad()
    run(net).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_the_same_gradients(reentrant, together):
    net, loss = fused()
    headwise.regularize(net, SigmaReparam(init="one"))
    wanted = gradients(net, lambda net: loss(net, 0))
    calls = [layer.forward for layer in net.layers]
    for layer, call in zip(net.layers, calls, strict=True):
        layer.forward = lambda *x, call=call, **k: checkpoint(call, *x, use_reentrant=reentrant, **k)
    together.clear()
    for ours, theirs in zip(gradients(net, lambda net: loss(net, 0)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    # in the forward all together, in the backward each layer's own
    assert together[0] == 4 and set(together[1:]) == {1}


def test_layers_that_are_called_or_read_alone_compute_their_own_weights(together):
    net, loss = fused()
    headwise.regularize(net, SigmaReparam(init="one"))
    together.clear()
    layer = net.layers[1]
    alone = layer.c_attn.weight
    assert together == [1]
    layer.c_attn(torch.randn(2, 24)).sum().backward()
    assert together == [1, 1] and layer.c_attn.parametrizations.weight.original.grad is not None
    seen = []
    layer.c_attn.register_forward_hook(lambda module, *_: seen.append(module.weight))
    loss(net, 0)
    assert together == [1, 1, 4] and torch.allclose(seen[0], alone)


def test_two_forwards_may_be_differentiated_one_by_one_and_a_failed_one_leaves_nothing(together):
    net, loss = fused()
    headwise.regularize(net, SigmaReparam(init="one"))
    wanted = [gradients(net, lambda net, seed=seed: loss(net, seed)) for seed in (0, 1)]
    net.zero_grad()
    first, second = loss(net, 0), loss(net, 1)
    first.backward()
    second.backward()
    for p, *parts in zip((p for p in net.parameters() if p.grad is not None), *wanted, strict=True):
        torch.testing.assert_close(p.grad, sum(parts), rtol=1e-5, atol=1e-6)
    hook = net.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(net, 0)
    hook.remove()
    assert not together_._running.passes


def test_evaluation_and_folding_have_the_bits_of_the_last_weights():
    net, loss = fused()
    handle = headwise.regularize(net, SigmaReparam(init="one"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss(net, step).backward()
        optimizer.step()
        handle.after_step()
    net.eval()
    with torch.no_grad():
        before = loss(net, 5)
        # a write that no version counter sees
        for p in net.parameters():
            p.data.mul_(1.5)
        assert loss(net, 5) != before
        for p in net.parameters():
            p.data.div_(1.5)
    torch.testing.assert_close(loss(net, 5), before)
    twin = copy.deepcopy(net)
    headwise.handle(twin).fold()
    torch.testing.assert_close(loss(twin, 5), before, rtol=1e-6, atol=0)


def test_a_copy_computes_its_own_weights_and_changes_nothing_of_the_first(together):
    net, loss = fused()
    headwise.regularize(net, SigmaReparam(init="one"))
    before = loss(net, 0).item()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    together.clear()
    assert loss(twin, 0).item() != before and loss(net, 0).item() == before
    assert together == [4, 4]


def test_a_weight_that_changes_before_the_backward_is_told():
    net, loss = fused()
    headwise.regularize(net, SigmaReparam())
    value = loss(net, 0)
    with torch.no_grad():
        net.layers[0].c_attn.parametrizations.weight.original.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between its forward and its backward"):
        value.backward()


def test_frozen_and_unused_weights_get_no_gradient_or_none_but_zero():
    net, loss = fused()
    headwise.regularize(net, SigmaReparam())
    frozen = net.layers[0].c_attn.parametrizations.weight.original.requires_grad_(False)
    net.layers[1].forward = lambda x, *a, **k: x
    loss(net, 0).backward()
    assert frozen.grad is None and net.layers[0].c_proj.parametrizations.weight.original.grad.any()


def test_weights_that_blocks_do_not_tile_and_clipped_ones_are_computed_alone(together):
    net, loss = fused()
    handle = headwise.regularize(net, SigmaReparam(layers="qk"), QKClip(threshold=0.01))
    loss(net, 0).backward()
    handle.after_step()
    assert not together
    spectral = chains(net)[0][0]
    assert isinstance(spectral, Spectral) and spectral.tiling is None


def test_transforms_and_functional_calls_use_the_weights_that_they_are_given():
    net, _ = fused()
    headwise.regularize(net, SigmaReparam(init="one"))
    names = {name: p.detach().clone() for name, p in net.named_parameters()}
    doubled = {name: 2 * p if name.endswith("gamma") else p for name, p in names.items()}
    with torch.no_grad():
        other = copy.deepcopy(net)
        for name, p in other.named_parameters():
            p.copy_(doubled[name])
        wanted = other(ids())
    torch.testing.assert_close(torch.func.functional_call(net, doubled, (ids(),)), wanted)
    grads = torch.func.grad(lambda p: torch.func.functional_call(net, p, (ids(),)).square().mean())(names)
    net(ids()).square().mean().backward()
    for name, p in net.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)


def test_a_step_of_spectral_norm_runs_no_more_operators_than_torchs(together):
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name.split("::")[-1]
            if not (function.is_view or name in ("detach", "empty", "promote_types")):
                self.names.append(name)
            return function(*args, **(kwargs or {}))

    layers = [nn.Linear(16, 16, bias=False) for _ in "ab"]
    block = Block("w", layers[0], "w.weight", "weight", slice(0, 16), 1, 16)
    spectral = Spectral(layers[0].weight, [block], None)
    reparametrize(layers[0], "weight", spectral)
    nn.utils.parametrizations.spectral_norm(layers[1])
    counts = []
    for layer in layers:
        with Count() as count:
            layer(torch.ones(2, 16)).sum().backward()
            if layer is layers[0]:
                spectral.iterate(layer.parametrizations.weight.original)
        counts.append(len(count.names))
    assert counts[0] <= counts[1]


def test_operators_of_stacked_weights_have_the_shapes_that_they_announce():
    stack, vectors, gamma = torch.randn(3, 8, 6), (torch.randn(3, 8), torch.randn(3, 6)), torch.rand(3)
    calls = [
        (spectral_group.spectral_scale, (stack, *vectors, gamma, 1, [2, 1])),
        (spectral_group.spectral_slopes, (stack, stack, *vectors, None, gamma, gamma, 0, [2, 1])),
        (spectral_group.power_iteration, (stack, vectors[1], False)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.registered, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("places", [("cpu",), ()], ids=["together", "alone"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_vectors_that_move_after_the_forward_give_no_wrong_gradients(method, places, monkeypatch):
    monkeypatch.setattr(together_, "TOGETHER_ON", places)

    def slopes(between):
        torch.manual_seed(0)
        net, loss = of_transformers(gpt2)
        handle = headwise.regularize(net, method)
        with torch.no_grad():
            for parameter in net.parameters():
                # so that the vectors do not fit any more
                parameter.add_(0.2 * torch.randn(parameter.shape))
        value = loss(net, 1) + handle.loss()
        between(handle)
        value.backward()
        return [parameter.grad for parameter in net.parameters()]

    right = slopes(lambda handle: None)
    if places:
        # computed from a copy of the vectors
        assert all(map(torch.equal, slopes(lambda handle: handle.after_step()), right))
    else:
        with pytest.raises(
            RuntimeError, match=r"singular vector.*changed in place.*after_step\(\), after the backward"
        ):
            slopes(lambda handle: handle.after_step())


@pytest.mark.parametrize("places", [("cpu",), ()], ids=["together", "alone"])
@pytest.mark.parametrize("method", [*METHODS, WeightNorm()], ids=repr)
def test_second_derivatives_leave_out_frozen_weights(method, places, monkeypatch):
    monkeypatch.setattr(together_, "TOGETHER_ON", places)
    net, loss = of_transformers(gpt2)
    handle = headwise.regularize(net, method)
    frozen = [
        p for name, p in net.named_parameters() if name.endswith("0.attn.c_attn.parametrizations.weight.original")
    ]
    assert len(frozen) == 1
    frozen[0].requires_grad_(False)
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(loss(net, 1) + handle.loss(), learned, create_graph=True, allow_unused=True)
        size = sum(slope.square().sum() for slope in first if slope is not None)
        second = torch.autograd.grad(size, learned, allow_unused=True)
    assert sum(slope is not None and slope.any() for slope in second) > 10
