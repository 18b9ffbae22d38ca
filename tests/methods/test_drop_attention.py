import pytest
import torch
from naive import PADDING, logits, qkv, seen_weights, weights

from headwise.attend.methods import DropAttention
from headwise.testing.calls import attend_with


@pytest.mark.parametrize("unit", ["column", "element"])
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}])
def test_weights_are_dropped_and_the_row_sums_to_one_again(unit, settings):
    q, k, _ = qkv()
    left, a = seen_weights(DropAttention(p=0.5, unit=unit), q, k, **settings), weights(q, k, **settings)
    kept = left != 0
    assert kept.any(-1).all() and (a[~kept] > 0).any()
    torch.testing.assert_close(left, a * kept / (a * kept).sum(-1, keepdim=True))
    columns = (kept == kept.any(2, keepdim=True)) | (a == 0)
    assert columns.all() == (unit == "column")


@pytest.mark.parametrize("unit", ["column", "element"])
def test_with_its_gradient_it_equals_removing_the_key_before_the_softmax(unit):
    q, k, v = qkv()
    method = DropAttention(p=0.5, unit=unit)
    kept = seen_weights(method, q, k) != 0
    grads = []
    for form in ("removed", "fast", "textbook"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if form == "removed":
            out = logits(*leaves[:2]).masked_fill(~kept, float("-inf")).softmax(-1) @ leaves[2]
        else:
            out = attend_with([method], *leaves, form=form)[0]
        out.square().sum().backward()
        grads.append([out.detach()] + [x.grad for x in leaves])
    for wanted, fast, textbook in zip(*grads):
        torch.testing.assert_close(fast, wanted)
        torch.testing.assert_close(textbook, wanted)


def test_a_detached_normalizer_keeps_the_value_and_changes_the_gradient():
    q, k, v = qkv()
    found = {}
    for detach in (False, True):
        leaf = q.clone().requires_grad_()
        out = attend_with([DropAttention(p=0.5, detach_normalizer=detach)], leaf, k, v)[0]
        out.square().sum().backward()
        found[detach] = (out.detach(), leaf.grad)
    torch.testing.assert_close(found[True][0], found[False][0])
    assert (found[True][1] - found[False][1]).abs().max() > 1e-3

    kept = (seen_weights(DropAttention(p=0.5), q, k) != 0).float()
    leaf = q.clone().requires_grad_()
    a = weights(leaf, k) * kept
    ((a / a.sum(-1, keepdim=True).detach()) @ v).square().sum().backward()
    torch.testing.assert_close(found[True][1], leaf.grad)


@pytest.mark.parametrize("unit", ["column", "element"])
def test_a_window_drops_neighbouring_keys_together(unit):
    q, k, _ = qkv(b=8, h=8, t=2, n=400)
    kept = seen_weights(DropAttention(p=0.3, window=4, unit=unit), q, k)[:, :, 0] != 0
    for row in kept.flatten(0, 1)[:, 1:]:
        _, runs = torch.unique_consecutive(row, return_counts=True)
        dropped = [int(n) for n, here in zip(runs[1:-1], row[runs.cumsum(0)[:-2]]) if not here]
        assert dropped and min(dropped) >= 4
    # Each window starts with p / w, so a key stays with (1 - p / w) ^ w.
    assert abs(kept.float().mean() - (1 - 0.3 / 4) ** 4) < 0.02


@pytest.mark.parametrize("form", ["fast", "textbook"])
def test_no_query_loses_all_its_keys(form):
    q, k, _ = qkv(b=2, t=6)
    sliding = torch.ones(6, 6, dtype=torch.bool).tril() & ~torch.ones(6, 6, dtype=torch.bool).tril(-2)
    for settings in ({}, {"causal": True}, {"mask": PADDING}, {"mask": sliding[None, None]}):
        left = seen_weights(DropAttention(p=0.99), q, k, form=form, **settings)
        torch.testing.assert_close(left.sum(-1), torch.ones(2, 3, 6))


@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("unit", ["column", "element"])
def test_a_host_sink_keeps_its_share_of_the_row(form, unit):
    q, k, _ = qkv()
    sinks = torch.tensor([0.5, -1.0, 2.0])
    left = seen_weights(DropAttention(p=0.5, unit=unit), q, k, sinks=sinks, form=form)
    s = logits(q, k).masked_fill(left == 0, float("-inf"))
    wanted = torch.cat([s, sinks.view(1, 3, 1, 1).expand(2, 3, 6, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(left, wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p": 1.2}, r"p must lie in \[0, 1\), got 1.2"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"unit": "row"}, "unit must be one of 'column', 'element', got 'row'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DropAttention(**settings)
