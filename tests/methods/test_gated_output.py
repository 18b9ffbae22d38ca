import pytest
import torch
from naive import qkv

from headwise.methods import GatedOutput
from headwise.regularizing.standalone import attend_with, fit_standalone, standalone_site


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
