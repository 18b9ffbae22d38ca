import pytest
import torch
from naive import qkv, weights

from headwise.attend.methods import SymmetricAttention
from headwise.testing.calls import attend_with


def test_queries_stand_in_for_keys_in_training_and_evaluation():
    q, k, v = qkv()
    for training in (True, False):
        torch.testing.assert_close(
            attend_with([SymmetricAttention()], q, k, v, training=training)[0], weights(q, q) @ v
        )


def test_the_logits_are_symmetric():
    q, k, _ = qkv()
    eye = torch.eye(6).expand(2, 3, 6, 6)
    a = attend_with([SymmetricAttention()], q, k, eye)[0]
    ratio = a.log() - a.log().mT
    # log A_ij - log A_ji depends on the rows alone: it is L_j - L_i.
    torch.testing.assert_close(ratio, ratio[..., :1] - ratio[..., :1].mT, atol=1e-5, rtol=0)


def test_a_cached_call_is_refused_with_the_remedy():
    q, k, v = qkv(t=1, n=6)
    with pytest.raises(ValueError, match="1 queries and 6 keys; run it without a cache"):
        attend_with([SymmetricAttention()], q, k, v)


def test_keys_stand_in_for_queries_where_asked():
    q, k, v = qkv()
    torch.testing.assert_close(attend_with([SymmetricAttention(keep="keys")], q, k, v)[0], weights(k, k) @ v)


def test_grouped_keys_stand_in_for_every_query_of_their_group():
    q, _, _ = qkv(h=4)
    _, k, v = qkv(h=2)
    wide = k.repeat_interleave(2, 1)
    out = attend_with([SymmetricAttention(keep="keys")], q, k, v)[0]
    torch.testing.assert_close(out, weights(wide, wide) @ v.repeat_interleave(2, 1))


def test_what_stays_must_be_queries_or_keys():
    with pytest.raises(ValueError, match="keep must be one of 'queries', 'keys', got 'values'"):
        SymmetricAttention(keep="values")
