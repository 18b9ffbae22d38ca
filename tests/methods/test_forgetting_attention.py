"""ForgettingAttention: the gates' products on the whole matrix, both forms, half precision, and what it refuses."""

import pytest
import torch
from naive import logits, qkv
from small_models import HOSTS, fresh

import headwise
from headwise import EntropyPenalty, ForgettingAttention, Temperature
from headwise.attend.attention import matrix_free
from headwise.attend.core.site import Site
from headwise.testing.calls import attend_with, fit_standalone, standalone_site


@pytest.fixture(params=["fast", "textbook"])
def form(request):
    return request.param


def fitted(q, k, x, causal=None, **settings):
    """Fit the method with gates of its own."""
    site = standalone_site(q, k, hidden=x)
    site.causal = causal
    fit = fit_standalone([ForgettingAttention(**settings)], site)
    with torch.no_grad():
        fit.states[0].tensor("weight").copy_(
            torch.randn(q.shape[1], x.shape[-1], generator=torch.Generator().manual_seed(3))
        )
    return fit


def gates(fit, x):
    """Write the gates f (B, H, T) of the paper."""
    state = fit.states[0]
    return torch.sigmoid(torch.einsum("btc,hc->bht", x, state.tensor("weight")) + state.tensor("bias")[:, None])


def decay(f):
    """Write the logarithm of the product of the gates from the earlier token, left out, to the later one, gate by
    gate."""
    t = f.shape[-1]
    d = torch.zeros(*f.shape, t, dtype=f.dtype)
    for i in range(t):
        for j in range(t):
            low, high = min(i, j), max(i, j)
            d[..., i, j] = f[..., low + 1 : high + 1].log().sum(-1)
    return d


def layer_input(t=6, seed=4):
    return torch.randn(2, t, 5, generator=torch.Generator().manual_seed(seed))


def test_a_causal_call_adds_the_logarithm_of_the_product_of_later_gates(form):
    q, k, v = qkv()
    x = layer_input()
    fit = fitted(q, k, x)
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form, hidden=x, causal=True)
    wanted = (logits(q, k, causal=True) + decay(gates(fit, x))).softmax(-1) @ v
    torch.testing.assert_close(out, wanted)
    assert fit.kernels == ({"fused"} if form == "fast" else {"explicit"})


def test_padded_tokens_on_the_left_change_nothing_of_real_ones(form):
    q, k, v = qkv()
    x = layer_input()
    fit = fitted(q, k, x, causal=True)
    order = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = order & (torch.arange(6) >= torch.tensor([0, 2])[:, None])[:, None, None, :]
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form, hidden=x, mask=mask)
    alone, _ = attend_with(
        fit.methods, q[1:, :, 2:], k[1:, :, 2:], v[1:, :, 2:], fitted=fit, form=form, hidden=x[1:, 2:], causal=True
    )
    torch.testing.assert_close(out[1:, :, 2:], alone)


def test_where_queries_see_both_sides_the_gates_between_count_both_ways(form):
    q, k, v = qkv()
    x = layer_input()
    fit = fitted(q, k, x)
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form, hidden=x)
    torch.testing.assert_close(out, (logits(q, k) + decay(gates(fit, x))).softmax(-1) @ v)


def test_grouped_keys_have_a_gate_for_each_query_head(form):
    q, _, _ = qkv(h=4)
    _, k, v = qkv(h=2, seed=1)
    x = layer_input()
    fit = fitted(q, k, x)
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form, hidden=x, causal=True)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, (logits(q, k, causal=True) + decay(gates(fit, x))).softmax(-1) @ v)


def test_its_gradients_are_the_formulas():
    q, k, v = qkv()
    x = layer_input().requires_grad_()
    fit = fitted(q, k, x)
    learned = [fit.states[0].tensor(name) for name in ("weight", "bias")]
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, hidden=x, causal=True)
    found = torch.autograd.grad(out.square().sum(), [x, *learned])
    wanted = ((logits(q, k, causal=True) + decay(gates(fit, x))).softmax(-1) @ v).square().sum()
    for got, expected in zip(found, torch.autograd.grad(wanted, [x, *learned]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_sums_keep_their_precision_beside_keys_in_bf16():
    # Sums of hundreds, whose bf16 neighbours lie whole nats apart: the last gates decide, and a rounded sum would lose
    # them.
    t = 512
    q, k, v = (x.to(torch.bfloat16) for x in qkv(b=1, h=2, t=t, d=8))
    x = torch.ones(1, t, 5)
    fit = fit_standalone([ForgettingAttention()], standalone_site(q, k, hidden=x))
    with torch.no_grad():
        fit.states[0].tensor("bias").copy_(torch.tensor([-1.0, 0.5]))
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, hidden=x.to(torch.bfloat16), causal=True)
    assert fit.kernels == {"fused"}
    log_f = torch.nn.functional.logsigmoid(torch.tensor([-1.0, 0.5]))
    distance = (torch.arange(t)[:, None] - torch.arange(t)).clamp(min=0)
    exact = (logits(q.double(), k.double(), causal=True) + log_f.double()[:, None, None] * distance).softmax(
        -1
    ) @ v.double()
    assert (out.double() - exact).abs().max() < 0.03


@pytest.mark.parametrize(
    ("others", "kind"), [([], "past"), ([Temperature(value=0.5)], "past"), ([EntropyPenalty(strength=1.0)], None)]
)
def test_where_a_kernel_edits_logits_it_takes_causal_calls_unless_others_need_the_weights(monkeypatch, others, kind):
    asked = []

    def attend(q, k, v, mask, causal, scale, kind, by):
        asked.append(kind)
        sums = by.transpose(1, 2)
        s = q @ k.mT * scale + (sums[..., :, None] - sums[..., None, :])
        s = s.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
        return s.softmax(-1) @ v, s.logsumexp(-1)

    monkeypatch.setattr(matrix_free, "edits_run", lambda *tensors: True)
    monkeypatch.setattr(matrix_free, "attend_edited", attend)
    q, k, v = qkv()
    x = layer_input()
    methods = [*others, ForgettingAttention()]
    fit = fit_standalone(methods, standalone_site(q, k, hidden=x))
    out, _ = attend_with(methods, q, k, v, fitted=fit, hidden=x, causal=True)
    assert asked == ([] if kind is None else [kind])
    assert fit.kernels == ({"rows"} if kind is None else {"edited logits"})
    wanted, _ = attend_with(methods, q, k, v, fitted=fit, hidden=x, causal=True, form="textbook")
    torch.testing.assert_close(out, wanted)


def test_a_gate_that_stays_open_changes_nothing():
    q, k, v = qkv()
    x = layer_input()
    out, _ = attend_with([ForgettingAttention(bias=40.0)], q, k, v, hidden=x, causal=True)
    torch.testing.assert_close(out, attend_with([], q, k, v, causal=True)[0])


def test_a_cache_is_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(
        ValueError, match=r"ForgettingAttention needs the gates of all keys at standalone.*use_cache=False"
    ):
        attend_with([ForgettingAttention()], q[:, :, -1:], k, v, hidden=layer_input()[:, -1:])


def test_a_model_generates_without_a_cache_and_says_so_with_one():
    model = fresh(HOSTS["llama"]).eval()
    headwise.regularize(model, ForgettingAttention(bias=2.0))
    ids = torch.tensor([[5, 7, 9]])
    out = model.generate(ids, max_new_tokens=3, use_cache=False, do_sample=False)
    assert out.shape == (1, 6)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=3, do_sample=False)


def test_layers_whose_tokens_it_cannot_count_are_refused():
    assert "pools" in ForgettingAttention().refuse(Site("x", torch.nn.Module(), pooled=True))
    assert "window" in ForgettingAttention().refuse(Site("x", torch.nn.Module(), windowed=True))
    assert ForgettingAttention().refuse(Site("x", torch.nn.Module())) is None
    q, k, v = qkv()
    site = standalone_site(q, k)
    site.hidden = 5
    fit = fit_standalone([ForgettingAttention()], site)
    with pytest.raises(ValueError, match=r"ForgettingAttention needs the layer's input \(B, T, C\)"):
        attend_with(fit.methods, q, k, v, fitted=fit, causal=True)
