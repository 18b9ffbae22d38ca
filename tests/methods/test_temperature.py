import pytest
import torch
from naive import logits, qkv

from headwise.attend.methods import Temperature
from headwise.testing.calls import attend_with


@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("training", [True, False])
def test_logits_are_divided(form, training):
    q, k, v = qkv()
    out = attend_with([Temperature(value=0.3)], q, k, v, causal=True, form=form, training=training)[0]
    torch.testing.assert_close(out, (logits(q, k, causal=True) / 0.3).softmax(-1) @ v)


def test_an_additive_bias_is_part_of_the_logits():
    q, k, v = qkv()
    bias = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(6))
    out = attend_with([Temperature(value=0.3)], q, k, v, mask=bias)[0]
    torch.testing.assert_close(out, ((logits(q, k) + bias) / 0.3).softmax(-1) @ v)


@pytest.mark.bits
def test_a_value_of_one_changes_no_bit():
    q, k, v = qkv()
    assert torch.equal(attend_with([Temperature()], q, k, v)[0], attend_with([], q, k, v)[0])


def test_value_must_be_positive():
    with pytest.raises(ValueError, match="value must be positive and finite, got -1"):
        Temperature(value=-1.0)
