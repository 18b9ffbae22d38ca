import pytest
import torch
from naive import PADDING, qkv, weights
from small_models import HOSTS, fresh

import headwise
from headwise.attend.attention.exponential import exponentials, logarithms
from headwise.attend.methods import (
    GFSA,
    LASER,
    XSA,
    AttentionSink,
    AttnScale,
    DifferentialAttention,
    NeuTRENO,
    ReAttention,
)
from headwise.testing.calls import attend_with


def textbook(q, k, v, **settings):
    """Write out log(A exp(v)) in fp64."""
    return (weights(q.double(), k.double(), **settings) @ v.double().exp()).log()


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}])
def test_the_output_is_the_logarithm_of_the_mean_of_exponentials(settings):
    q, k, v = (x.double().requires_grad_() for x in qkv())
    for form in ("fast", "textbook"):
        out = attend_with([LASER()], q, k, v, form=form, **settings)[0]
        wanted = textbook(q, k, v, **settings)
        torch.testing.assert_close(out, wanted)
        # The gradient does not depend on the largest value, which is subtracted and added.
        found, right = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted))
        torch.testing.assert_close(found, right)


def test_a_largest_value_far_away_costs_no_digits_and_nothing_overflows():
    q, k, v = qkv()
    v = 200 + 5 * v
    torch.testing.assert_close(attend_with([LASER()], q, k, v)[0], textbook(q, k, v).float())


def test_a_value_counts_as_at_least_61_below_the_largest():
    q, k, v = qkv()
    v[:, :, 0] = 500.0
    # No query sees key 0 but the first, which sees it alone; the others have values more than 61 below it.
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[1:, 0] = False
    mask[0, 1:] = False
    out = attend_with([LASER()], q, k, v, mask=mask[None, None])[0]
    torch.testing.assert_close(out[:, :, 0], torch.full_like(out[:, :, 0], 500.0))
    torch.testing.assert_close(out[:, :, 1:], torch.full_like(out[:, :, 1:], 500 - 61.13558), atol=1e-2, rtol=0)


def log_space(q, k, v, g):
    """Return the gradients of Σ g·log(A exp(v)) by softmaxes of s + v in fp64, with v as far below as it counts."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~torch.ones(q.shape[2], k.shape[2]).tril().bool(), -torch.inf)
    floor = v.amax(2, keepdim=True) - 61.13558
    counted = torch.maximum(v, floor)
    # of each channel: the gradient of log Σ_j exp(s_j + v_j) - log Σ_j exp(s_j)
    shares = torch.softmax(s[..., None] + counted[:, :, None], -2)
    of_logits = ((shares - torch.softmax(s, -1)[..., None]) * g[:, :, :, None]).sum(-1) / q.shape[-1] ** 0.5
    of_values = (shares * g[:, :, :, None]).sum(2).masked_fill(v < floor, 0.0)
    return of_logits @ k, of_logits.mT @ q, of_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("spread", [30, 100, 300])
def test_gradients_are_finite_and_right_at_logits_of_a_thousand(spread, form, dtype):
    g = torch.Generator().manual_seed(0)
    q, k, v, out_grad = (torch.randn(2, 3, 16, 8, generator=g) for _ in range(4))
    q, k, v = ((times * x).to(dtype).requires_grad_() for times, x in ((20, q), (20, k), (spread / 4, v)))
    assert (q @ k.mT).abs().max() / 8**0.5 > 1000 and v.amax() - v.amin() > spread
    for size in (1.0, 1e8):
        out = attend_with([LASER()], q, k, v, form=form, causal=True)[0]
        found = torch.autograd.grad((out * out_grad.to(dtype) * size).sum(), (q, k, v))
        assert all(x.isfinite().all() for x in found)
        # a difference of 0.002 between logits is their rounding here, and in bf16 one of some units
        if dtype == torch.float32:
            for x, y in zip(found, log_space(q, k, v, out_grad * size), strict=True):
                torch.testing.assert_close(x.double(), y, rtol=1e-2, atol=2e-3 * size)


def test_values_of_keys_that_no_query_sees_do_not_matter():
    q, k, v = qkv()
    out = attend_with([LASER()], q, k, v, mask=PADDING)[0]
    v[1, :, 4:] = 1e6
    assert torch.equal(attend_with([LASER()], q, k, v, mask=PADDING)[0], out)


def test_a_query_without_keys_gets_zero_and_zero_gradients():
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, 2] = False
    out = attend_with([LASER()], q, k, v, mask=mask)[0]
    assert not out[0, :, 2].any() and out[1, :, 2].all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v)) and not q.grad[0, :, 2].any()


def test_half_precision_is_off_by_some_rounding_of_the_exponentials():
    q, k, v = qkv(t=64)
    wanted = textbook(q, k, v)
    for dtype, bound in ((torch.bfloat16, 0.02), (torch.float16, 0.004)):
        out = attend_with([LASER()], *(x.to(dtype) for x in (q, k, v)))[0]
        assert out.dtype == dtype and float((out.double() - wanted).abs().max()) < bound
    # fp16 holds values down to 19 below the largest, as exponentials around 1 use both halves of its range.
    e, m = exponentials(torch.tensor([0.0, -19.0, -25.0]).half().view(1, 1, 3, 1), None)
    torch.testing.assert_close(logarithms(e, m).float().flatten(), torch.tensor([0.0, -19.0, -19.4]), atol=0.02, rtol=0)


def test_other_methods_see_plain_values_and_outputs():
    q, k, v = qkv()
    own = v / v.norm(dim=-1, keepdim=True)
    laser = textbook(q, k, v).float()
    wanted = laser - (laser * own).sum(-1, keepdim=True) * own
    for methods in ([LASER(), XSA()], [XSA(), LASER()]):
        torch.testing.assert_close(attend_with(methods, q, k, v)[0], wanted)


def test_values_that_other_layers_read_are_plain():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, num_layers=2), torch.randn(2, 5, 16)
    outs = []
    for methods in ([LASER(), NeuTRENO(strength=0.5)], [NeuTRENO(strength=0.5), LASER()]):
        handle = headwise.regularize(model, *methods)
        outs.append(model(x))
        handle.remove()
    assert torch.equal(*outs) and outs[0].isfinite().all()


def test_sinks_are_refused():
    with pytest.raises(ValueError, match=r"LASER: the sinks of .* have no values"):
        attend_with([AttentionSink(), LASER()], *qkv())


@pytest.mark.parametrize("other", [AttnScale(), DifferentialAttention(), GFSA(), ReAttention()], ids=repr)
def test_methods_that_make_weights_negative_are_refused_at_the_fit(other):
    model = fresh(HOSTS["own"])
    for methods in ([LASER(), other], [other, LASER()]):
        with pytest.raises(ValueError) as told:
            headwise.regularize(model, *methods)
        assert str(told.value) == (
            f"LASER() has no logarithm for the negative weights that {other!r} makes: use one of them"
        )
