"""An evaluation changes no state, so that it can be exported, decomposed and differentiated as a function."""

from __future__ import annotations

import copy

import pytest
import torch
from grids import part_of_grid
from methods.weight_hosts import ids, model
from torch import nn
from torch.func import functional_call, grad, vmap

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

NAMES = list(shelf.__all__)
# one of each kind: carries values, has sinks, computes weights, learns, acts in training alone
SOME = ("NeuTRENO", "ValueResidual", "AttentionSink", "SigmaReparam", "QKNorm", "DropHead", "EntropyPenalty")


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def fitted(name, net, example):
    cls = REGISTRY[name]
    return headwise.regularize(net, cls(**cls.strong), example=example)


def state_of(net, handle):
    counters = [f.passes.count() for f in handle.fitted]
    buffers = [value.clone() for module in net.modules() for value in module.buffers(recurse=False)]
    return counters, buffers, {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_changes_no_state(name):
    net = encoder()
    x = torch.randn(2, 5, 16)
    handle = fitted(name, net, x)
    net.eval()
    before = copy.deepcopy(state_of(net, handle))
    progress = copy.deepcopy(handle.state())
    for _ in range(2):
        net(x)
    counters, buffers, weights = state_of(net, handle)
    assert counters == before[0]
    assert all(torch.equal(a, b) for a, b in zip(buffers, before[1], strict=True))
    assert all(torch.equal(weights[key], value) for key, value in before[2].items())
    assert handle.state() == progress


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", part_of_grid(NAMES, SOME))
def test_an_exported_evaluation_can_be_decomposed(name):
    net, x = encoder(), torch.randn(2, 5, 16)
    handle = fitted(name, net, x)
    net.eval()
    handle.fold()
    want = net(x)
    program = torch.export.export(net, (x,)).run_decompositions()
    torch.testing.assert_close(program.module()(x), want, rtol=1e-4, atol=1e-5)
    # an operator of ours would need headwise where the program runs
    assert not any(getattr(node.target, "namespace", "") == "headwise" for node in program.graph.nodes)


def test_an_exported_evaluation_takes_other_sizes(monkeypatch):
    from headwise.attend.attention import computation

    monkeypatch.setattr(computation, "WHOLE", 64)
    net, x = encoder(), torch.randn(2, 5, 16)
    fitted("AttentionSink", net, x).fold()
    net.eval()
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=512)}
    program = torch.export.export(net, (x,), dynamic_shapes=(sizes,))
    longer = torch.randn(3, 50, 16)
    torch.testing.assert_close(program.module()(longer), net(longer), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", SOME)
def test_an_evaluation_is_written_as_onnx(name, tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    net, x = encoder(), torch.randn(2, 5, 16)
    handle = fitted(name, net, x)
    net.eval()
    handle.fold()
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(net, (x,), path, dynamo=True, verbose=False)
    read = reference.ReferenceEvaluator(path)
    (found,) = read.run(None, {read.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), net(x), rtol=1e-4, atol=1e-5)


# a layer that is causal and has three heads takes these not
ELSEWHERE = ("LSA", "FeatScale", "DifferentialAttention")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", part_of_grid([name for name in NAMES if name not in ELSEWHERE], SOME))
def test_gradients_of_a_function_are_those_of_autograd(name):
    net = model()
    fitted(name, net, ids())
    net.eval()
    parameters = {key: value.detach() for key, value in net.named_parameters()}

    def loss(parameters, batch):
        return functional_call(net, parameters, (batch,)).square().mean()

    found = grad(loss)(parameters, ids())
    net.zero_grad()
    net(ids()).square().mean().backward()
    for key, value in net.named_parameters():
        want = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(found[key], want, rtol=1e-3, atol=1e-6, msg=key)
    each = vmap(grad(lambda parameters, row: loss(parameters, row[None])), in_dims=(None, 0))(parameters, ids())
    one = grad(loss)(parameters, ids()[:1])
    for key in one:
        torch.testing.assert_close(each[key][0], one[key], rtol=1e-3, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["DropHead", "DropKey", "NeuTRENO", "SigmaReparam", "EntropyPenalty"])
def test_a_function_can_train(name):
    net = model()
    handle = fitted(name, net, ids())
    net.train()
    parameters = {key: value.detach() for key, value in net.named_parameters()}

    def loss(parameters):
        return functional_call(net, parameters, (ids(),)).square().mean() + handle.loss()

    assert all(torch.isfinite(value).all() for value in grad(loss)(parameters).values())
