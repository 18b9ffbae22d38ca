"""The rows of all layers' weights computed together: the numbers and gradients of each layer computed alone."""

import copy

import pytest
import torch
from projections.test_spectral_group import HOSTS, chains
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headwise
from headwise import WeightNorm
from headwise.attend.projections import together as together_
from headwise.attend.projections import weight_rows


@pytest.fixture
def together(monkeypatch):
    """Compute together on CPUs too, as on CUDA, and count the groups."""
    monkeypatch.setattr(together_, "TOGETHER_ON", ("cpu",))
    computed, compute = [], weight_rows.RowGroup.compute
    monkeypatch.setattr(
        weight_rows.RowGroup, "compute", lambda self, weights: computed.append(len(weights)) or compute(self, weights)
    )
    return computed


@pytest.mark.parametrize("init", ["current", "one"])
@pytest.mark.parametrize("host", HOSTS)
def test_five_steps_are_those_of_each_layer_alone(host, init, together, monkeypatch):
    net, loss = HOSTS[host]()
    net = net.double()
    handle = headwise.regularize(net, WeightNorm(init=init))
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (net, twin)]
    for step in range(5):
        together.clear()
        value = loss(net, step)
        assert together == [len(chains(net))]
        with monkeypatch.context() as alone:
            alone.setattr(together_, "TOGETHER_ON", ())
            expected = loss(twin, step)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
        for total, optimizer in zip((value, expected), optimizers, strict=True):
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        handle.after_step()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_second_derivatives_are_those_of_operators(together, monkeypatch):
    net, loss = HOSTS["Conv1D"]()
    net = net.double()
    headwise.regularize(net, WeightNorm())
    found = []
    for where in (("cpu",), ()):
        monkeypatch.setattr(together_, "TOGETHER_ON", where)
        # fused attention has no second derivative
        with sdpa_kernel(SDPBackend.MATH):
            grads = torch.autograd.grad(loss(net, 0), list(net.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), list(net.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_have_the_same_gradients(reentrant, together):
    net, loss = HOSTS["one matrix of q, k, v"]()
    headwise.regularize(net, WeightNorm(init="one"))
    loss(net, 0).backward()
    wanted = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    for layer in net.layers:
        run = layer.forward
        layer.forward = lambda *args, run=run, **kwargs: checkpoint(run, *args, use_reentrant=reentrant, **kwargs)
    together.clear()
    loss(net, 0).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])
    # in the forward all together, in the backward each layer's own
    assert together[0] == 4 and set(together[1:]) == {1}


def test_folding_has_the_bits_of_the_last_weights(together):
    net, loss = HOSTS["grouped heads"]()
    handle = headwise.regularize(net, WeightNorm(init="one"))
    before = loss(net, 0)
    together.clear()
    handle.fold()
    assert together and torch.equal(loss(net, 0), before)


def test_a_weight_that_changes_before_the_backward_is_told(together):
    net, loss = HOSTS["Conv1D"]()
    headwise.regularize(net, WeightNorm())
    total = loss(net, 0)
    with torch.no_grad():
        chains(net)[0].original.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between its forward and its backward"):
        total.backward()


def test_operators_have_the_shapes_that_they_announce():
    stack, gain = torch.randn(6, 4), torch.rand(6)
    for run, arguments in (
        (weight_rows.scaled_rows, (stack, gain, 1, [2, 4])),
        (weight_rows.row_slopes, (stack, stack, gain, 0, [2, 4])),
    ):
        torch.library.opcheck(run.registered, arguments, test_utils=("test_schema", "test_faketensor"))
