"""Functional calls and transforms of torch.func: gradients, second derivatives, and what may not be written in them."""

import pytest
import torch
from methods.weight_hosts import ids, model
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise
from headwise.attend.methods.nuclear_decay import nuclear_norm
from headwise.attend.projections import together


def parameters_of(net):
    return {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}


@pytest.mark.parametrize("where", [("cpu",), ()], ids=["as on CUDA", "layer by layer"])
@pytest.mark.parametrize("method", [headwise.SigmaReparam(), headwise.SpectralNorm(), headwise.WeightNorm()], ids=repr)
def test_inner_steps_of_maml_learn_all_parameters(method, where, monkeypatch):
    monkeypatch.setattr(together, "TOGETHER_ON", where)
    net = model().double()
    headwise.regularize(net, method)

    def slopes(call, parameters):
        with sdpa_kernel(SDPBackend.MATH):
            loss = call(ids()).square().mean()
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            # not along the gradient itself, where a constant would do
            turned = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in first)
            return first, torch.autograd.grad(turned, parameters)

    own = parameters_of(net)
    found = slopes(lambda x: functional_call(net, own, (x,)), list(own.values()))
    right = slopes(net, list(net.parameters()))
    for ours, theirs in zip(found, right, strict=True):
        for name, x, y in zip(own, ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12, msg=name)


# of torch, which decomposes operators for jvp
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("method", [headwise.NuclearDecay(strength=0.3), headwise.ProductDecay(strength=0.3)], ids=repr)
def test_transforms_differentiate_penalties_on_weights_twice(method):
    net = model().double()
    handle = headwise.regularize(net, method)
    own = parameters_of(net)
    directions = {name: torch.randn_like(p) for name, p in own.items()}

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, batch):
            return self.net(batch).square().mean() + handle.loss()

    def loss(parameters):
        return functional_call(Whole(), {f"net.{name}": p for name, p in parameters.items()}, (ids(),))

    def along(slopes):
        return sum((slopes[name] * directions[name]).sum() for name in slopes)

    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(loss(own), list(own.values()), create_graph=True)
        second = torch.autograd.grad(along(dict(zip(own, first, strict=True))), list(own.values()))
        found = {
            "grad": (first, grad(loss)(own)),
            "grad of grad": (second, grad(lambda p: along(grad(loss)(p)))(own)),
            "jvp of grad": (second, jvp(grad(loss), (own,), (directions,))[1]),
        }
    for right, ours in found.values():
        for name, x in zip(own, right, strict=True):
            torch.testing.assert_close(ours[name], x, rtol=1e-6, atol=1e-9, msg=name)


def test_transforms_of_nuclear_norms_are_those_of_singular_values():
    torch.manual_seed(0)
    a, b = (torch.randn(5, 2, 3, 7, dtype=torch.float64) for _ in "ab")

    def hessian_product(norms, a, b):
        return grad(lambda x: grad(lambda y: norms(y, b).square().sum())(x).sin().sum())(a)

    right = vmap(lambda a, b: hessian_product(lambda x, y: torch.linalg.svdvals(x.mT @ y)[:, :3].sum(1), a, b))(a, b)
    torch.testing.assert_close(vmap(lambda a, b: hessian_product(nuclear_norm, a, b))(a, b), right)
    # a product of 0 has no gradient, as one of its factors at the start of an adapter
    nothing = grad(lambda x: nuclear_norm(x, torch.zeros_like(b[0])).sum())(a[0])
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("name", ["QKClip", "QKRates", "ReAttention"])
@pytest.mark.parametrize("where", [("cpu",), ()], ids=["as on CUDA", "layer by layer"])
def test_what_a_transform_may_not_write_is_told_by_name(name, where, monkeypatch):
    monkeypatch.setattr(together, "TOGETHER_ON", where)
    net = model()
    headwise.regularize(net, getattr(headwise, name)())
    own = {key: p.detach() for key, p in net.named_parameters()}

    def loss(parameters):
        return functional_call(net, parameters, (ids(),)).square().mean()

    with pytest.raises(RuntimeError, match=rf"{name} stores numbers in each training forward, .* eval\(\)"):
        grad(loss)(own)
    net.eval()
    assert any(value.any() for value in grad(loss)(own).values())
