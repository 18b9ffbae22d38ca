"""DifferentialAttention: the formula of its paper on the whole matrix, pairs under grouped queries, and its
refusals."""

import math

import pytest
import torch
from naive import qkv, weights

import headwise
from headwise import DifferentialAttention
from headwise.attend.core.site import Site
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

B, H, T, D = 2, 4, 6, 4


@pytest.fixture(params=["fast", "textbook"])
def form(request):
    return request.param


def fitted(q, k, depth=2, **settings):
    """Fit the method with learned numbers of its own that differ from where they start."""
    fit = fit_standalone([DifferentialAttention(**settings)], standalone_site(q, k, depth=depth, layers=4))
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in fit.site.module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    return fit


def paper(fit, q, k, v, start, mask=None):
    """Write the paper's layer: heads of two halves, values as wide as both, one lambda, a norm per head."""
    q1, k1, q2, k2 = (fit.states[0].tensor(name) for name in ("query_1", "key_1", "query_2", "key_2"))
    factor = (q1 @ k1).exp() - (q2 @ k2).exp() + start
    outs = []
    for j in range(q.shape[1] // 2):
        halves = [weights(q[:, i : i + 1], k[:, i : i + 1], mask)[:, 0] for i in (2 * j, 2 * j + 1)]
        values = torch.cat([v[:, 2 * j], v[:, 2 * j + 1]], dim=-1)
        o = (halves[0] - factor * halves[1]) @ values
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * fit.states[0].tensor("gain") * (1 - start)
        outs += [o[..., :D], o[..., D:]]
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("depth", [0, 2])
def test_it_is_the_papers_layer_at_every_depth(form, depth):
    q, k, v = qkv(h=H)
    fit = fitted(q, k, depth)
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form)
    # The paper counts layers from 1.
    start = 0.8 - 0.6 * math.exp(-0.3 * ((depth + 1) - 1))
    torch.testing.assert_close(out, paper(fit, q, k, v, start), rtol=1e-4, atol=1e-5)


def test_a_number_may_stand_for_the_start(form):
    q, k, v = qkv(h=H)
    fit = fitted(q, k, start=0.5)
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form)
    torch.testing.assert_close(out, paper(fit, q, k, v, 0.5), rtol=1e-4, atol=1e-5)


def test_both_maps_are_masked(form):
    q, k, v = qkv(h=H)
    fit = fitted(q, k, start=0.5)
    order = torch.ones(T, T, dtype=torch.bool).tril()
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form, causal=True)
    torch.testing.assert_close(out, paper(fit, q, k, v, 0.5, order), rtol=1e-4, atol=1e-5)


def test_under_grouped_queries_a_pair_has_two_heads_of_values(form):
    q = qkv(h=8)[0]
    k, v = (x for x in qkv(h=4, seed=1)[1:])
    fit = fitted(q, k, start=0.5)
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form)
    # As in the paper's code: keys of single heads and values of pairs are each repeated.
    pairs = v.unflatten(1, (2, 2)).repeat_interleave(2, dim=1).flatten(1, 2)
    torch.testing.assert_close(out, paper(fit, q, k.repeat_interleave(2, dim=1), pairs, 0.5), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_lambda_is_the_papers():
    q, k, v = qkv(h=H)
    fit = fitted(q, k, start=0.5)
    attend_with(fit.methods, q, k, v, fitted=fit)[0][..., 0].sum().backward()
    vectors = [fit.states[0].tensor(name) for name in ("query_1", "key_1", "query_2", "key_2")]

    def loss(*four):
        factor = (four[0] * four[1]).sum().exp() - (four[2] * four[3]).sum().exp() + 0.5
        a = weights(q, k)
        o = (a[:, 0::2] - factor * a[:, 1::2]) @ torch.cat([v[:, 0::2], v[:, 1::2]], dim=-1)
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * fit.states[0].tensor("gain").detach() * 0.5
        return o[..., 0].sum() + o[..., D].sum()

    free = [x.detach().clone().requires_grad_() for x in vectors]
    for found, wanted in zip(vectors, torch.autograd.grad(loss(*free), free), strict=True):
        torch.testing.assert_close(found.grad, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "reason"), [(3, 3, "3 heads"), (4, 1, "1 heads of keys and values")])
def test_heads_that_make_no_pairs_are_refused_by_name(heads, kv_heads, reason):
    site = Site("a", torch.nn.Module(), heads=heads, kv_heads=kv_heads, head_dim=D)
    assert reason in DifferentialAttention().refuse(site)


def test_values_of_another_width_are_refused_in_the_call():
    q, k, v = qkv(h=H)
    with pytest.raises(ValueError, match=r"values as wide as queries.*where="):
        attend_with([DifferentialAttention()], q, k, v[..., :2])


def test_its_start_draws_from_no_generator_of_torchs():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    handle = headwise.regularize(model, DifferentialAttention())
    assert torch.equal(torch.rand(3), wanted)
    first, second = (f.states[0].tensor("query_1") for f in handle.fitted)
    assert not torch.equal(first, second) and 0 < first.abs().max() < 0.5


@pytest.mark.parametrize("start", [1.0, -0.1, "half", True])
def test_a_start_out_of_range_is_refused(start):
    with pytest.raises((ValueError, TypeError), match="start"):
        DifferentialAttention(start=start)


def test_the_vectors_start_elsewhere_for_another_seed_and_alike_for_the_same():
    def vectors(seed):
        layer = torch.nn.MultiheadAttention(16, 4)
        model = torch.nn.Sequential(layer)
        state = torch.random.get_rng_state()
        handle = headwise.regularize(model, DifferentialAttention(), seed=seed)
        assert torch.equal(state, torch.random.get_rng_state()), "torch's generator moved"
        found = {n: p.detach().clone() for n, p in model.named_parameters() if "query_1" in n or "key_2" in n}
        handle.remove(discard=True)
        return found

    first, again, other = vectors(0), vectors(0), vectors(1)
    assert len(first) == 2
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])
        assert 0.02 < value.std() < 0.3


def second(q, k, v, x, factor, group, mask=None):
    """Write the authors' second layer: queries 2j and 2j + 1 on one head of keys and values, sigmoid factors, no
    norm."""
    outs = []
    for j in range(q.shape[1] // 2):
        keys, values = k[:, group[j]], v[:, group[j]]
        one, two = (weights(q[:, i : i + 1], keys[:, None], mask)[:, 0] @ values for i in (2 * j, 2 * j + 1))
        outs.append(one - torch.sigmoid(x @ factor[j])[..., None] * two)
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize(("kv_heads", "group"), [(4, [0, 2]), (2, [0, 1]), (1, [0, 0])])
def test_the_second_version_is_the_authors_layer_in_both_heads_places(form, kv_heads, group):
    q, _, _ = qkv(h=H)
    _, k, v = qkv(h=kv_heads, seed=1)
    x = torch.randn(B, T, 5, generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(T) < torch.tensor([T, 4])[:, None])[:, None, None, :]
    fit = fit_standalone([DifferentialAttention(version=2)], standalone_site(q, k, hidden=x))
    factor = fit.states[0].tensor("factor")
    assert factor.shape == (H // 2, 5) and not factor.any()
    with pytest.raises(AttributeError):
        fit.states[0].tensor("gain")
    torch.nn.init.normal_(factor)
    out, _ = attend_with(fit.methods, q, k, v, fitted=fit, form=form, hidden=x, mask=mask)
    wanted = second(q, k, v, x, factor, group, mask)
    torch.testing.assert_close(out[:, 0::2], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:, 1::2], wanted, rtol=1e-4, atol=1e-5)
    assert fit.kernels == ({"fused"} if form == "fast" else {"explicit"})


def test_the_second_version_says_what_it_needs():
    q, k, v = qkv(h=H)
    site = Site("x", torch.nn.Module(), heads=4, kv_heads=4)
    fit = fit_standalone([DifferentialAttention(version=2)], standalone_site(q, k, hidden=torch.zeros(B, T, 5)))
    with pytest.raises(ValueError, match=r"DifferentialAttention needs the layer's input \(B, T, C\)"):
        attend_with(fit.methods, q, k, v, fitted=fit)
    assert DifferentialAttention(version=2).refuse(site) is None
    with pytest.raises(ValueError, match="version must be one of 1, 2, got 3"):
        DifferentialAttention(version=3)
    with pytest.raises(ValueError, match="start belongs to version 1"):
        DifferentialAttention(version=2, start=0.5)


def test_an_odd_head_of_values_makes_a_pair_in_the_second_version():
    # one head of keys and values serves all pairs
    assert DifferentialAttention(version=2).refuse(Site("x", torch.nn.Module(), heads=4, kv_heads=1)) is None
    assert "5 heads" in DifferentialAttention(version=2).refuse(Site("x", torch.nn.Module(), heads=5, kv_heads=5))
