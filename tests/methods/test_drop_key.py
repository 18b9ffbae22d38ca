import pytest
import torch
from naive import PADDING, logits, qkv, seen_weights

from headwise.attend.methods import DropKey
from headwise.testing.calls import attend_with, fit_standalone, standalone_site


@pytest.mark.parametrize("unit", ["column", "element"])
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}])
def test_dropped_keys_are_minus_infinity_before_the_softmax(unit, settings):
    q, k, _ = qkv()
    left = seen_weights(DropKey(p=0.4, unit=unit), q, k, **settings)
    s = logits(q, k, **settings)
    assert ((left == 0) & s.isfinite()).any()
    torch.testing.assert_close(left, s.masked_fill(left == 0, float("-inf")).softmax(-1))


def test_elements_are_drawn_for_each_query_head_and_sample_with_probability_p():
    q, k, _ = qkv(b=3, h=3, t=40, n=400)
    kept = seen_weights(DropKey(p=0.3), q, k) != 0
    assert abs(kept.float().mean() - 0.7) < 0.01
    assert len({tuple(row.tolist()) for row in kept.flatten(0, 2)}) == 360


def test_the_first_query_of_a_causal_call_never_loses_its_only_key():
    q, k, v = qkv()
    for unit in ("column", "element"):
        for seed in range(5):
            out = attend_with([DropKey(p=0.95, unit=unit)], q, k, v, causal=True, seed=seed)[0]
            torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
            assert out.isfinite().all()


@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("unit", ["column", "element"])
def test_a_row_without_any_allowed_key_gives_zero(unit, form):
    q, k, v = qkv()
    left_padded = (torch.arange(6) >= torch.tensor([0, 2])[:, None])[:, None, None] & torch.ones(
        6, 6, dtype=torch.bool
    ).tril()
    leaf = q.clone().requires_grad_()
    out = attend_with([DropKey(p=0.5, unit=unit)], leaf, k, v, mask=left_padded, form=form)[0]
    assert torch.equal(out[1, :, :2], torch.zeros(3, 2, 4)) and out.isfinite().all()
    out.sum().backward()
    assert leaf.grad.isfinite().all()


def test_end_p_is_reached_linearly_at_the_last_layer():
    q, k, _ = qkv()
    ps = [
        float(
            fit_standalone([DropKey(p=0.3, end_p=0.1)], standalone_site(q, k, depth=depth, layers=5))
            .states[0]
            .value("p")
        )
        for depth in range(5)
    ]
    torch.testing.assert_close(torch.tensor(ps), torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]))


def test_end_p_must_be_a_probability():
    with pytest.raises(ValueError, match=r"DropKey: end_p must lie in \[0, 1\), got 1.5"):
        DropKey(end_p=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropped_columns_of_a_causal_call_are_those_of_a_whole_mask(dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv(t=40, d=8))
    method = DropKey(p=0.5, unit="column")
    found = attend_with([method], q, k, v, causal=True, seed=3)[0]
    wanted = attend_with([method], q, k, v, mask=torch.ones(1, 1, 40, 40, dtype=torch.bool).tril(), seed=3)[0]
    assert (found - attend_with([], q, k, v, causal=True)[0]).abs().max() > 0.1
    torch.testing.assert_close(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_dropped_columns_of_a_causal_call_have_second_derivatives_where_the_plain_kernel_is_chosen():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.requires_grad_() for x in qkv())
    with sdpa_kernel(SDPBackend.MATH):
        out = attend_with([DropKey(p=0.5, unit="column")], q, k, v, causal=True)[0]
        (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), q)
    assert curve.isfinite().all() and curve.abs().max() > 1e-4


def test_values_wider_than_queries_keep_their_dropped_columns_under_causality():
    q, k, v = qkv()
    wide = torch.cat([v, 2 * v], dim=-1)
    found = attend_with([DropKey(p=0.5, unit="column")], q, k, wide, causal=True)[0]
    narrow = attend_with([DropKey(p=0.5, unit="column")], q, k, v, causal=True)[0]
    torch.testing.assert_close(found, torch.cat([narrow, 2 * narrow], dim=-1))
