import pytest
import torch
from naive import qkv, weights

from headwise.attend.methods import NeuTRENO, ValueResidual
from headwise.testing.calls import attend_with


def test_values_are_mixed_with_the_first_layers_before_attention():
    q, k, v = qkv()
    first = qkv(seed=1)[2]
    out = attend_with([ValueResidual(mix=0.3)], q, k, v, first_values=first, training=False)[0]
    torch.testing.assert_close(out, weights(q, k) @ (0.7 * v + 0.3 * first))


@pytest.mark.bits
def test_a_mix_of_one_uses_the_first_layers_values_alone():
    q, k, v = qkv()
    first = qkv(seed=1)[2]
    a, b = (attend_with([ValueResidual(mix=1.0)], q, k, values, first_values=first)[0] for values in (v, -v))
    assert torch.equal(a, b)


@pytest.mark.bits
def test_the_first_layer_is_plain():
    q, k, v = qkv()
    assert torch.equal(attend_with([ValueResidual()], q, k, v)[0], attend_with([], q, k, v)[0])


def test_neutreno_after_it_pulls_from_the_mixed_values():
    q, k, v = qkv()
    first = qkv(seed=1)[2]
    mixed = 0.5 * v + 0.5 * first
    out = attend_with([ValueResidual(), NeuTRENO(strength=0.6)], q, k, v, first_values=first)[0]
    torch.testing.assert_close(out, weights(q, k) @ mixed + 0.6 * (first - mixed))


def test_mix_must_be_a_share():
    with pytest.raises(ValueError, match=r"mix must lie in \[0, 1\], got 1.1"):
        ValueResidual(mix=1.1)
