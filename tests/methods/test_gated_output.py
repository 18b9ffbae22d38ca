import pytest
import torch
from naive import qkv

from headwise.attend.core.site import Site
from headwise.attend.methods import GatedOutput
from headwise.testing.calls import attend_with, fit_standalone, standalone_site


@pytest.mark.parametrize("per", ["head", "element"])
def test_the_gate_is_a_sigmoid_of_the_layers_input(per):
    q, k, v = qkv()
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(4))
    fitted = fit_standalone([GatedOutput(per=per)], standalone_site(q, k, hidden=x))
    weight, bias = fitted.states[0].tensor("weight"), fitted.states[0].tensor("bias")
    torch.nn.init.normal_(weight)
    out = attend_with(fitted.methods, q, k, v, fitted=fitted, hidden=x, training=False)[0]
    gate = torch.sigmoid(torch.einsum("btc,gc->btg", x, weight) + bias).view(2, 6, 3, -1).permute(0, 2, 1, 3)
    assert gate.shape[-1] == (1 if per == "head" else 4)
    torch.testing.assert_close(out, attend_with([], q, k, v)[0] * gate)
    out.sum().backward()
    assert (weight.grad != 0).any() and (bias.grad != 0).all()


def test_every_gate_starts_near_one():
    q, k, v = qkv()
    out = attend_with([GatedOutput()], q, k, v, hidden=torch.randn(2, 6, 5))[0]
    torch.testing.assert_close(out, attend_with([], q, k, v)[0] * 0.98201379)


def test_per_must_be_known():
    with pytest.raises(ValueError, match="per must be one of 'head', 'element', got 'token'"):
        GatedOutput(per="token")


@pytest.mark.parametrize(("start", "factor"), [("half", 1), ("one", 2)])
def test_without_a_bias_the_gate_reads_the_first_channels_alone(start, factor):
    q, k, v = qkv()
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(4))
    fitted = fit_standalone([GatedOutput(channels=3, start=start)], standalone_site(q, k, hidden=x))
    plain = attend_with([], q, k, v)[0]
    weight = fitted.states[0].tensor("weight")
    assert weight.shape == (3, 3) and not weight.any()
    assert torch.equal(attend_with(fitted.methods, q, k, v, fitted=fitted, hidden=x)[0], plain * factor / 2)
    torch.nn.init.normal_(weight)
    gate = factor * torch.sigmoid(torch.einsum("btc,hc->bht", x[..., :3], weight))[..., None]
    x[..., 3:] = float("nan")
    torch.testing.assert_close(attend_with(fitted.methods, q, k, v, fitted=fitted, hidden=x)[0], plain * gate)
    with pytest.raises(AttributeError, match="keeps no 'bias'"):
        fitted.states[0].tensor("bias")


def test_more_channels_than_enter_the_layer_are_refused():
    site = Site("x", torch.nn.Module(), hidden=8)
    assert GatedOutput(channels=12).refuse(site) == "reads the first 12 channels of its input, and this layer's has 8"
    assert GatedOutput(channels=8).refuse(site) is None
    with pytest.raises(ValueError, match="GatedOutput: channels must be at least 1, got 0"):
        GatedOutput(channels=0)
    with pytest.raises(ValueError, match="start must be one of 'open', 'half', 'one', got 'shut'"):
        GatedOutput(start="shut")
