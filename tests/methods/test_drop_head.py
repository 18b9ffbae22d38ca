import pytest
import torch
from naive import qkv

from headwise.methods import DropHead
from headwise.regularizing.standalone import attend_with


def factors(p, b=2, h=4, **settings):
    q, k, v = qkv(b=b, h=h)
    plain = attend_with([], q, k, v)[0]
    out = attend_with([DropHead(p=p)], q, k, v, **settings)[0]
    ratio = (out / plain).flatten(2)
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    return ratio[..., 0]


def test_heads_that_stay_are_scaled_by_all_over_those_that_stay():
    found = factors(0.5, b=16, h=6)
    stay = (found != 0).sum(1, keepdim=True)
    torch.testing.assert_close(found, (found != 0) * 6 / stay)
    assert len(stay.unique()) > 1


def test_one_head_always_stays_and_each_is_it_equally_often():
    found = factors(0.999, b=2000, h=4) != 0
    assert (found.sum(1) >= 1).all()
    assert ((found.float().mean(0) - 0.25).abs() < 0.04).all()


def test_a_single_head_is_left_alone():
    q, k, v = qkv(h=1)
    assert torch.equal(attend_with([DropHead(p=0.9)], q, k, v)[0], attend_with([], q, k, v)[0])


def test_heads_drop_with_probability_p():
    assert abs((factors(0.2, b=500, h=8) == 0).float().mean() - 0.2) < 0.02


def test_evaluation_changes_no_bit():
    q, k, v = qkv()
    assert torch.equal(attend_with([DropHead(p=0.9)], q, k, v, training=False)[0], attend_with([], q, k, v)[0])


def test_p_must_be_below_one():
    with pytest.raises(ValueError, match=r"DropHead: p must lie in \[0, 1\), got -0.1"):
        DropHead(p=-0.1)
