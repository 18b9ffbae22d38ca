import pytest
import torch
from naive import qkv, seen_weights, weights

from headwise.attend.methods import DropColumn
from headwise.testing.calls import attend_with


@pytest.mark.parametrize("form", ["fast", "textbook"])
def test_whole_columns_are_zero_and_the_rest_is_not_scaled(form):
    q, k, _ = qkv()
    left = seen_weights(DropColumn(p=0.5), q, k, form=form)
    kept = (left != 0).any(2, keepdim=True)
    assert 0 < kept.float().mean() < 1
    torch.testing.assert_close(left, weights(q, k) * kept)


def test_the_share_of_dropped_columns_is_p_and_differs_by_sample_and_head():
    q, k, _ = qkv(b=8, h=8, t=1, n=500)
    kept = seen_weights(DropColumn(p=0.2), q, k)[:, :, 0] != 0
    assert abs(kept.float().mean() - 0.8) < 0.01
    flat = kept.flatten(0, 1)
    assert len({tuple(row.tolist()) for row in flat}) == 64


def test_windows_of_one_sample_share_its_draw():
    q, k, _ = qkv(b=4)
    kept = seen_weights(DropColumn(p=0.5), q, k, samples=2) != 0
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[2], kept[3])
    assert not torch.equal(kept[1], kept[2])


@pytest.mark.bits
def test_evaluation_and_p_zero_change_no_bit():
    q, k, v = qkv()
    plain = attend_with([], q, k, v)[0]
    assert torch.equal(attend_with([DropColumn(p=0.5)], q, k, v, training=False)[0], plain)
    assert torch.equal(attend_with([DropColumn(p=0.0)], q, k, v)[0], plain)


def test_p_must_be_a_probability_below_one():
    with pytest.raises(ValueError, match=r"DropColumn: p must lie in \[0, 1\), got 1"):
        DropColumn(p=1.0)
