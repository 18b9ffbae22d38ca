import pytest
import torch
from naive import PADDING, logits, qkv, seen_weights

from headwise.attend.methods import AttentionSink, DropKey, EntropyPenalty, Softpick, Temperature
from headwise.testing.calls import attend_with


def textbook(s, eps=1e-8):
    """Write out the paper's formula for logits s, -inf where masked."""
    up = s.exp() - 1
    size = up.abs().masked_fill(s == float("-inf"), 0.0)
    return up.relu() / (size.sum(-1, keepdim=True) + eps)


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}])
def test_weights_are_the_rectified_exponentials_over_the_sum_of_their_sizes(settings):
    q, k, v = (x.double().requires_grad_() for x in qkv())
    out = attend_with([Softpick()], q, k, v, **settings)[0]
    wanted = textbook(logits(q, k, **settings)) @ v
    torch.testing.assert_close(out, wanted)
    found, right = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted))
    torch.testing.assert_close(found, right)


def test_rows_sum_to_less_than_one_and_may_be_zero():
    q, k, _ = qkv()
    sums = seen_weights(Softpick(), q, k).sum(-1)
    assert (sums < 1).any() and (sums <= 1 + 1e-6).all()
    assert not seen_weights(Softpick(), q.abs(), -k.abs()).any()


def test_large_and_small_logits_keep_their_digits():
    q, k, v = qkv()
    torch.testing.assert_close(
        attend_with([Softpick()], 1e-4 * q, k, v)[0].double(),
        textbook(logits(1e-4 * q.double(), k.double())) @ v.double(),
        check_dtype=False, rtol=1e-3, atol=1e-5,
    )  # fmt: skip
    s = logits(1e3 * q, k)
    wanted = s.softmax(-1).masked_fill(s.amax(-1, keepdim=True) <= 0, 0.0) @ v
    torch.testing.assert_close(attend_with([Softpick()], 1e3 * q, k, v)[0], wanted)


def test_logits_of_zero_have_finite_gradients():
    _, k, v = qkv()
    q = torch.zeros(2, 3, 6, 4, requires_grad=True)
    attend_with([Softpick()], q, k, v)[0].sum().backward()
    assert q.grad.isfinite().all()


def test_a_lowest_number_in_a_mask_forbids_a_key():
    q, k, v = qkv()
    lowest = torch.zeros(2, 1, 1, 6).masked_fill(~PADDING, torch.finfo(torch.float32).min)
    torch.testing.assert_close(
        attend_with([Softpick()], q, k, v, mask=lowest)[0], attend_with([Softpick()], q, k, v, mask=PADDING)[0]
    )


def test_it_normalises_the_final_logits_in_any_order():
    q, k, v = qkv()
    for other in (Temperature(value=0.5), DropKey(p=0.4)):
        before, after = ([other, Softpick()], [Softpick(), other])
        torch.testing.assert_close(*(attend_with(methods, q, k, v)[0] for methods in (before, after)))
    out = attend_with([Softpick(), Temperature(value=0.5)], q, k, v)[0]
    torch.testing.assert_close(out, textbook(2 * logits(q, k)) @ v)


def test_penalties_read_its_weights():
    q, k, v = qkv()
    a = textbook(logits(q, k))
    entropy = -(a * a.clamp(min=1e-30).log()).sum(-1).mean()
    found = attend_with([Softpick(), EntropyPenalty(strength=1.0)], q, k, v)[1]
    torch.testing.assert_close(found.abs(), entropy.abs())


def test_sinks_and_impossible_settings_are_refused():
    for methods in ([Softpick(), AttentionSink()], [AttentionSink(), Softpick()]):
        with pytest.raises(ValueError, match=r"Softpick: .* has sinks, which need a softmax"):
            attend_with(methods, *qkv())
    with pytest.raises(ValueError, match="Softpick: eps must be positive and finite, got 0"):
        Softpick(eps=0.0)
