"""Formulas of the methods of 2021 to 2026, each written from its paper, on the whole matrix."""

import pytest
import torch

import headwise
from headwise import GFSA, LSA, XSA, AttentionDropout, AttentionSink, BranchDrop, LayerScale, SSMax, ZLoss
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

B, H, T, D = 2, 3, 6, 4


@pytest.fixture(params=["fast", "textbook"])
def form(request):
    return request.param


def made(keys=T):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=g) for n in (T, keys, keys)]


def weights(q, k, mask=None):
    s = q @ k.mT / D**0.5
    return (s if mask is None else s.masked_fill(~mask, float("-inf"))).softmax(-1)


def fitted(method, q, k, **values):
    """Fit a method alone and give its learned parameters these values."""
    fit = fit_standalone([method], standalone_site(q, k))
    for name, value in values.items():
        with torch.no_grad():
            fit.states[0].tensor(name).copy_(value)
    return fit


def test_xsa_leaves_nothing_along_the_tokens_own_value(form):
    q, k, v = made()
    out, _ = attend_with([XSA()], q, k, v, form=form)
    o = weights(q, k) @ v
    unit = v / v.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(out, o - (o * unit).sum(-1, keepdim=True) * unit)
    assert (out * unit).sum(-1).abs().max() < 1e-6


def test_xsas_gate_starts_at_nothing_and_weighs_each_head(form):
    q, k, v = made()
    o, unit = weights(q, k) @ v, v / v.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(attend_with([XSA(learned=True)], q, k, v, form=form)[0], o)
    gain = torch.tensor([0.0, 0.5, 1.0])
    out, _ = attend_with([XSA(learned=True)], q, k, v, form=form, fitted=fitted(XSA(learned=True), q, k, gain=gain))
    torch.testing.assert_close(out, o - gain[:, None, None] * (o * unit).sum(-1, keepdim=True) * unit)


def test_xsas_tanh_gate_starts_at_nothing_and_stays_within_one(form):
    q, k, v = made()
    o, unit = weights(q, k) @ v, v / v.norm(dim=-1, keepdim=True)
    gated = XSA(learned=True, gate="tanh")
    torch.testing.assert_close(attend_with([gated], q, k, v, form=form)[0], o)
    alpha = torch.tensor([-0.7, 0.5, 9.0])
    out, _ = attend_with([gated], q, k, v, form=form, fitted=fitted(gated, q, k, gain=alpha))
    torch.testing.assert_close(out, o - alpha.tanh()[:, None, None] * (o * unit).sum(-1, keepdim=True) * unit)


def test_xsas_gate_needs_something_that_is_learned():
    with pytest.raises(ValueError, match=r'XSA: gate="tanh" bounds a learned gain; add learned=True'):
        XSA(gate="tanh")
    with pytest.raises(ValueError, match="gate must be one of 'linear', 'tanh', got 'relu'"):
        XSA(learned=True, gate="relu")


def test_xsa_with_a_cache_takes_the_new_tokens_values():
    q, k, v = made()
    whole, _ = attend_with([XSA()], q, k, v, causal=True)
    row = torch.ones(1, 1, 1, T, dtype=torch.bool)
    last, _ = attend_with([XSA()], q[:, :, -1:], k, v, mask=row)
    torch.testing.assert_close(last, whole[:, :, -1:])


def test_xsa_of_a_value_of_zero_is_finite():
    q, k, v = made()
    v[:, :, 2] = 0
    out, _ = attend_with([XSA()], q, k, v.requires_grad_())
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert out.isfinite().all() and grad.isfinite().all()


def test_ssmax_is_a_softmax_to_the_base_of_the_number_of_keys(form):
    q, k, v = made()
    z = q @ k.mT / D**0.5
    powers = T ** (0.43 * z)
    torch.testing.assert_close(
        attend_with([SSMax()], q, k, v, form=form)[0], powers / powers.sum(-1, keepdim=True) @ v, rtol=1e-5, atol=1e-6
    )


def test_ssmax_counts_the_keys_that_each_query_may_see(form):
    q, k, v = made()
    wanted = torch.stack(
        [
            (
                (0.43 * torch.log(torch.tensor(i + 1.0)) * (q[:, :, i : i + 1] @ k[:, :, : i + 1].mT / D**0.5)).softmax(
                    -1
                )
                @ v[:, :, : i + 1]
            )[:, :, 0]
            for i in range(T)
        ],
        dim=2,
    )
    torch.testing.assert_close(attend_with([SSMax()], q, k, v, form=form, causal=True)[0], wanted, rtol=1e-5, atol=1e-6)


def test_ssmax_keeps_double_precision(form):
    q, k, v = (x.double() for x in made())
    powers = torch.tensor(float(T), dtype=torch.float64) ** (0.5 * q @ k.mT / D**0.5)
    got = attend_with([SSMax(scale=0.5)], q, k, v, form=form)[0]
    torch.testing.assert_close(got, powers / powers.sum(-1, keepdim=True) @ v, rtol=1e-13, atol=1e-14)


def test_ssmaxs_scale_is_learned_or_stays():
    q, k, _ = made()
    learned, fixed = fitted(SSMax(), q, k), fitted(SSMax(learned=False), q, k)
    assert [p.shape for p in learned.site.module.parameters()] == [(H,)]
    assert not list(fixed.site.module.parameters())


def test_the_z_loss_is_the_mean_square_of_the_log_sum_exp_over_real_queries(form):
    q, k, v = made()
    real = torch.arange(T) < torch.tensor([T, 4])[:, None]
    _, penalty = attend_with([ZLoss(strength=0.5)], q, k, v, form=form, mask=real[:, None, None, :])
    s = (q @ k.mT / D**0.5).masked_fill(~real[:, None, None, :], float("-inf"))
    level = s.logsumexp(-1).square().mean(1)
    torch.testing.assert_close(penalty, 0.5 * level[real].mean())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("level", [-1e4, -1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_the_z_loss_has_no_gradient_of_padded_queries_whatever_number_hides_their_keys(form, level, causal):
    q, k, v = (x.requires_grad_() for x in made())
    seen = (torch.arange(T) >= torch.tensor([0, 3])[:, None])[:, None, None]
    seen = seen if causal else seen & torch.ones(T, T).tril().bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, level)
    _, penalty = attend_with([ZLoss(strength=0.5)], q, k, v, form=form, mask=mask, causal=causal)
    q2, k2 = q.detach().requires_grad_(), k.detach().requires_grad_()
    s = q2 @ k2.mT / D**0.5
    levels = [s[0, :, i, : i + 1].logsumexp(-1).square().mean() for i in range(T)]
    levels += [s[1, :, i, 3 : i + 1].logsumexp(-1).square().mean() for i in range(3, T)]
    wanted = 0.5 * torch.stack(levels).mean()
    torch.testing.assert_close(penalty, wanted)
    for got, expected in zip(torch.autograd.grad(penalty, (q, k)), torch.autograd.grad(wanted, (q2, k2)), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_sink_takes_its_share_of_every_row(form):
    q, k, v = made()
    logit = torch.tensor([-1.0, 0.0, 2.0])
    out, _ = attend_with([AttentionSink()], q, k, v, form=form, fitted=fitted(AttentionSink(), q, k, logit=logit))
    e = (q @ k.mT / D**0.5).exp()
    torch.testing.assert_close(out, e / (e.sum(-1, keepdim=True) + logit.exp()[:, None, None]) @ v)


def test_the_off_by_one_softmax_is_a_sink_of_logit_0(form):
    q, k, v = made()
    e = (q @ k.mT / D**0.5).exp()
    out, _ = attend_with([AttentionSink(learned=False)], q, k, v, form=form)
    torch.testing.assert_close(out, e / (1 + e.sum(-1, keepdim=True)) @ v)


def test_a_sinks_logit_has_the_textbooks_gradient():
    q, k, v = made()
    fit = fitted(AttentionSink(), q, k)
    attend_with([AttentionSink()], q, k, v, fitted=fit)[0].square().sum().backward()
    b = torch.zeros(H, requires_grad=True)
    e = (q @ k.mT / D**0.5).exp()
    (e / (e.sum(-1, keepdim=True) + b.exp()[:, None, None]) @ v).square().sum().backward()
    torch.testing.assert_close(fit.states[0].tensor("logit").grad, b.grad)


def test_a_host_with_sinks_of_its_own_is_refused_by_name():
    q, k, v = made()
    with pytest.raises(ValueError, match=r"its own sinks.*where="):
        attend_with([AttentionSink()], q, k, v, sinks=torch.zeros(H))


def test_attention_dropout_zeroes_weights_and_scales_the_rest_by_one_number():
    q, k, _ = (torch.randn(64, H, T, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    eye = torch.eye(T).expand(64, H, T, T)
    out, _ = attend_with([AttentionDropout(p=0.3)], q, k, eye)
    share = out / weights(q, k)
    kept = share > 0.5
    torch.testing.assert_close(share[kept], torch.full_like(share[kept], 1 / 0.7), rtol=1e-4, atol=1e-4)
    assert (share[~kept].abs() < 1e-6).all()
    # binomial, 6,912 weights: four standard deviations
    assert abs((~kept).float().mean().item() - 0.3) < 4 * (0.21 / kept.numel()) ** 0.5


@pytest.fixture
def model():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_branch_drop_leaves_whole_samples_out_and_scales_the_rest(model):
    x = torch.randn(400, 3, 8)
    attention = model.layers[0].self_attn
    normed = model.layers[0].norm1(x)
    branch = attention(normed, normed, normed, need_weights=False)[0]
    seen = []
    model.layers[0].norm2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0] - x))
    handle = headwise.regularize(model, BranchDrop(p=0.4))
    model.train()(x)
    handle.remove()
    share = (seen[-1] / branch).flatten(1).median(1).values
    kept = share > 0.5
    torch.testing.assert_close(seen[-1][kept], branch[kept] / 0.6, rtol=1e-3, atol=1e-5)
    assert (seen[-1][~kept].abs() < 1e-6).all()
    assert abs((~kept).float().mean().item() - 0.4) < 4 * (0.24 / 400) ** 0.5


def test_layer_scale_multiplies_each_channel_of_the_branch(model):
    x = torch.randn(2, 3, 8)
    plain = []
    model.layers[0].norm2.register_forward_pre_hook(lambda _, inputs: plain.append(inputs[0] - x))
    model.train()(x)
    handle = headwise.regularize(model, LayerScale(start=1.0))
    gain = torch.linspace(0.1, 2.0, 8)
    with torch.no_grad():
        handle.fitted[0].states[0].tensor("gain").copy_(gain)
    model(x)
    torch.testing.assert_close(plain[1], plain[0] * gain)
    handle.remove(discard=True)


def test_lsa_hides_each_tokens_own_key_and_divides_by_its_temperature(form):
    q, k, v = made()
    out, _ = attend_with([LSA()], q, k, v, form=form, fitted=fitted(LSA(), q, k, temperature=torch.tensor(2.0)))
    torch.testing.assert_close(out, weights(q / 2.0, k, ~torch.eye(T, dtype=torch.bool)) @ v)


def test_lsa_learns_a_temperature_for_each_head_or_one_for_the_layer(form):
    q, k, v = made()
    by_head = torch.tensor([0.5, 1.0, 3.0])
    for method, temperature in ((LSA(), by_head), (LSA(per="layer"), torch.tensor([2.0]))):
        fit = fitted(method, q, k, temperature=temperature)
        assert [p.shape for p in fit.site.module.parameters()] == [temperature.shape]
        out, _ = attend_with([method], q, k, v, form=form, fitted=fit)
        wanted = weights(q / temperature[:, None, None], k, ~torch.eye(T, dtype=torch.bool)) @ v
        torch.testing.assert_close(out, wanted)
    with pytest.raises(ValueError, match="LSA: per must be one of 'head', 'layer', got 'token'"):
        LSA(per="token")


def test_lsa_leaves_the_only_key_that_a_query_has(form):
    q, k, v = made()
    mask = torch.ones(T, T, dtype=torch.bool)
    mask[2] = torch.arange(T) == 2
    out, _ = attend_with([LSA()], q, k, v, form=form, mask=mask[None, None])
    torch.testing.assert_close(out[:, :, 2], v[:, :, 2])
    assert out.isfinite().all()


def test_lsa_with_a_cache_hides_the_new_tokens_own_keys(form):
    q, k, v = made()
    q = q[:, :, -2:]
    out, _ = attend_with([LSA()], q, k, v, form=form, fitted=fitted(LSA(), q, k, temperature=torch.tensor(2.0)))
    torch.testing.assert_close(out, weights(q / 2.0, k, ~torch.eye(T, dtype=torch.bool)[-2:]) @ v)


def test_lsa_without_its_diagonal_learns_a_temperature_on_causal_layers(form):
    q, k, v = made()
    method = LSA(diagonal=False)
    out, _ = attend_with(
        [method], q, k, v, form=form, causal=True, fitted=fitted(method, q, k, temperature=torch.tensor(0.5))
    )
    torch.testing.assert_close(out, weights(2 * q, k, torch.ones(T, T).tril().bool()) @ v)


def test_gfsa_adds_the_first_order_estimate_of_a_power(form):
    q, k, v = made()
    gain = torch.tensor([0.0, 0.3, -0.2])
    out, _ = attend_with([GFSA(order=4)], q, k, v, form=form, fitted=fitted(GFSA(order=4), q, k, gain=gain))
    a = weights(q, k)
    torch.testing.assert_close(out, (a + gain[:, None, None] * (a + 3 * (a @ a - a))) @ v)


def test_gfsa_refuses_a_cache_by_name():
    q, k, v = made()
    with pytest.raises(ValueError, match="use_cache=False"):
        attend_with([GFSA()], q[:, :, -1:], k, v)


@pytest.mark.parametrize(
    "text",
    [
        "XSA(strength=-1.0)",
        "SSMax(scale=0.0)",
        "AttentionDropout(p=1.0)",
        "BranchDrop(p=-0.1)",
        "LayerScale(start=0.0)",
        "GFSA(order=1)",
        "ZLoss(strength=-1.0)",
    ],
)
def test_settings_out_of_range_are_refused_by_name(text):
    with pytest.raises(ValueError, match=text.partition("(")[0]):
        headwise.parse(text)
