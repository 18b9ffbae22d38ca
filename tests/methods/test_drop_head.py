import pytest
import torch
from naive import qkv
from torch import nn

import headwise
from headwise.attend.methods import DropHead
from headwise.testing.calls import attend_with


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


@pytest.mark.bits
def test_a_single_head_is_left_alone():
    q, k, v = qkv(h=1)
    assert torch.equal(attend_with([DropHead(p=0.9)], q, k, v)[0], attend_with([], q, k, v)[0])


def test_heads_drop_with_probability_p():
    assert abs((factors(0.2, b=500, h=8) == 0).float().mean() - 0.2) < 0.02


@pytest.mark.bits
def test_evaluation_changes_no_bit():
    q, k, v = qkv()
    assert torch.equal(attend_with([DropHead(p=0.9)], q, k, v, training=False)[0], attend_with([], q, k, v)[0])


def test_p_must_be_below_one():
    with pytest.raises(ValueError, match=r"DropHead: p must lie in \[0, 1\), got -0.1"):
        DropHead(p=-0.1)


def test_without_rescaling_heads_that_stay_keep_their_values():
    q, k, v = qkv(b=16, h=6)
    plain = attend_with([], q, k, v)[0]
    out = attend_with([DropHead(p=0.5, rescale=False)], q, k, v)[0]
    stays = (out != 0).flatten(2).any(-1)
    assert 0 < stays.float().mean() < 1
    assert torch.equal(out, plain * stays[..., None, None])


def test_a_layer_with_one_head_is_not_applicable_and_an_error_where_no_other_is_left():
    one, four = (nn.MultiheadAttention(16, heads, batch_first=True) for heads in (1, 4))
    handle = headwise.regularize(nn.ModuleList([one, four]), DropHead())
    assert [f.site.name for f in handle.fitted] == ["1"]
    assert "not applicable" in str(handle.report()).split("\n")[1]
    handle.remove()
    for where in (["0"], lambda site: site.name == "0"):
        with pytest.raises(ValueError, match=r"0: .*DropHead always keeps one head, and this layer has no other"):
            headwise.regularize(nn.ModuleList([one, four]), DropHead(), where=where)


class OwnLayer(nn.Module):
    """Attention that does not tell how many heads it has."""

    def __init__(self, parts):
        super().__init__()
        self.qkv, self.parts = nn.Linear(16, 48), parts

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (self.parts, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("method", ["DropHead()", "Decorrelation()", "Disagreement()"])
def test_a_layer_that_turns_out_to_have_one_head_is_an_error_with_two_remedies(method):
    def model():
        return nn.Sequential(OwnLayer(1), OwnLayer(4))

    x = torch.randn(2, 5, 16)
    own = model()
    headwise.regularize(own, *headwise.parse(method))
    with pytest.raises(RuntimeError, match=r"^0 turned out to have one head: .*example=batch.*where="):
        own.train()(x)
    own = model()
    handle = headwise.regularize(own, *headwise.parse(method), example=x)
    assert [one.site.name for one in handle.fitted] == ["1"]
    own.train()(x)
    handle.remove()
    headwise.regularize(own, *headwise.parse(method), where=["1"])
    own.train()(x)
    # one head is no obstacle to others
    own = model()
    headwise.regularize(own, headwise.DropKey())
    own.train()(x)
