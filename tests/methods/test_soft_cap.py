import pytest
import torch
from naive import PADDING, logits, qkv

from headwise.attend.methods import SoftCap
from headwise.testing.calls import attend_with


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}])
def test_logits_are_bent_and_masked_keys_stay_masked(settings):
    q, k, v = (30 * x for x in qkv())
    leaf = q.clone().requires_grad_()
    out = attend_with([SoftCap(cap=5.0)], leaf, k, v, **settings)[0]
    s = logits(q, k, **settings)
    capped = torch.where(s.isfinite(), 5 * torch.tanh(logits(q, k) / 5), float("-inf"))
    torch.testing.assert_close(out, capped.softmax(-1) @ v)
    out.sum().backward()
    assert leaf.grad.isfinite().all()


def test_a_mask_of_lowest_finite_numbers_stays_a_mask():
    q, k, v = qkv()
    mask = torch.zeros(2, 1, 1, 6).masked_fill(~PADDING, torch.finfo(torch.float32).min)
    found = attend_with([SoftCap(cap=0.5)], q, k, v, mask=mask)[0]
    torch.testing.assert_close(found, attend_with([SoftCap(cap=0.5)], q, k, v, mask=PADDING)[0])


@pytest.mark.bits
def test_it_acts_in_evaluation_too():
    q, k, v = qkv()
    a, b = (attend_with([SoftCap(cap=0.1)], q, k, v, training=training)[0] for training in (True, False))
    assert torch.equal(a, b) and (a - attend_with([], q, k, v)[0]).abs().max() > 1e-2


def test_cap_must_be_positive():
    with pytest.raises(ValueError, match="cap must be positive and finite, got 0"):
        SoftCap(cap=0.0)
