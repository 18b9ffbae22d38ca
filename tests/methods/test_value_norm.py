import torch
from naive import qkv, weights
from torch import nn

from headwise.attend.core.site import Site
from headwise.attend.methods import ValueNorm
from headwise.testing.calls import attend_with


def test_values_get_unit_mean_square():
    q, k, v = qkv()
    unit = v / v.square().mean(-1, keepdim=True).sqrt()
    for training in (True, False):
        out = attend_with([ValueNorm()], q, k, 100 * v, training=training)[0]
        torch.testing.assert_close(out, weights(q, k) @ unit)


def test_a_value_of_zeros_stays_zero():
    q, k, v = qkv()
    v[:, :, 2] = 0.0
    v.requires_grad_()
    out = attend_with([ValueNorm()], q, k, v)[0]
    out.sum().backward()
    unit = v.detach() / (v.detach().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(out, weights(q, k) @ unit)
    assert v.grad.isfinite().all()


def test_hosts_that_normalise_their_values_are_refused():
    layer = nn.Module()
    assert ValueNorm().refuse(Site("x", layer)) is None
    layer.v_norm = nn.Identity()
    assert ValueNorm().refuse(Site("x", layer)) == "would act twice: the host normalises values itself"
