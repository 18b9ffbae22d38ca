import math
from types import SimpleNamespace

import pytest
import torch
from naive import PADDING, logits_of, penalty, qkv, weights

from headwise.attend.attention import computation as attention
from headwise.attend.core.call import Call
from headwise.attend.methods import EntropyPenalty, ZLoss
from headwise.testing.calls import attend_with


def entropies(a):
    return -(a * a.clamp(min=1e-38).log()).sum(-1)


@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("settings", [{}, {"causal": True}])
def test_it_is_minus_the_mean_entropy_in_nats(settings, form):
    q, k, v = qkv()
    found = penalty(EntropyPenalty(strength=0.5), q, k, v, form=form, **settings)
    torch.testing.assert_close(found, -0.5 * entropies(weights(q, k, **settings)).mean())


def test_only_real_queries_count():
    q, k, v = qkv()
    h = entropies(weights(q, k, PADDING))
    wanted = -(h[0].mean(0).sum() + h[1, :, :4].mean(0).sum()) / 10
    torch.testing.assert_close(penalty(EntropyPenalty(strength=1.0), q, k, v, mask=PADDING), wanted)


def test_the_target_is_a_share_of_the_largest_entropy_of_each_row():
    q, k, v = qkv(t=8)
    q = q * 2
    h, largest = entropies(weights(q, k, causal=True)), torch.arange(1, 9).float().log()
    away = h - 0.7 * largest
    wanted = torch.where(away.abs() > 0.2 * largest, away.square(), 0.0)
    assert 0 < (wanted > 0).float().mean() < 1
    found = penalty(EntropyPenalty(strength=2.0, target=0.7, band=0.2), q, k, v, causal=True)
    torch.testing.assert_close(found, 2 * wanted.mean())


def test_the_second_softmax_of_the_authors_code_hardly_moves():
    uniform, one_hot = torch.full((1, 2, 16, 16), 1 / 16), torch.eye(16).expand(1, 2, 16, 16)
    found = []
    for a in (uniform, one_hot):
        q, k = logits_of(a)
        found.append(float(penalty(EntropyPenalty(strength=1.0, head_mean=True), q, k, k)))
    assert found == pytest.approx([-math.log(16), -2.721], abs=1e-3)


def test_one_hot_weights_give_a_finite_gradient():
    q, k, v = qkv()
    for form in ("fast", "textbook"):
        leaf = (q * 1e4).requires_grad_()
        penalty(EntropyPenalty(strength=1.0), leaf, k, v, form=form).backward()
        assert leaf.grad.isfinite().all()


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"target is a share of log\(allowed keys\) and must lie in \[0, 1\], got 2.0"):
        EntropyPenalty(target=2.0)
    with pytest.raises(ValueError, match=r"band must be at least 0, got -0.1"):
        EntropyPenalty(band=-0.1)


@pytest.mark.parametrize("whole", [1 << 24, 64])
def test_the_head_averaged_form_averages_each_sentence_before_the_sentences(whole, monkeypatch):
    monkeypatch.setattr(attention, "WHOLE", whole)
    q, k, v = qkv(b=4, t=13)
    lengths = torch.tensor([13, 9, 5, 2])
    mask = (torch.arange(13) < lengths[:, None])[:, None, None, :]
    a = weights(q, k, mask)
    sentences = []
    for sample, n in enumerate(lengths.tolist()):
        second = a[sample].mean(0)[:n, :n].softmax(-1)
        sentences.append(-entropies(second).mean())
    found = penalty(EntropyPenalty(strength=1.0, head_mean=True), q, k, v, mask=mask)
    torch.testing.assert_close(found, torch.stack(sentences).mean())


@pytest.mark.parametrize("settings", [{}, {"target": 0.7, "band": 0.05}, {"head_mean": True}])
@pytest.mark.parametrize(
    "kind", [{"mask": PADDING}, *(pytest.param(kind, marks=pytest.mark.grid) for kind in ({}, {"causal": True}))]
)
def test_in_fp64_values_and_gradients_are_those_of_fp64(settings, kind):
    q, k, v = (x.double() for x in qkv())
    method = EntropyPenalty(strength=0.5, **settings)
    fast, textbook = (penalty(method, q, k, v, form=form, **kind) for form in ("fast", "textbook"))
    assert fast.dtype == textbook.dtype == torch.float64
    torch.testing.assert_close(fast, textbook, rtol=1e-12, atol=0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: attend_with([method], *x, **kind), leaves)


@pytest.mark.parametrize(
    "method", [EntropyPenalty(strength=1.0), EntropyPenalty(strength=1.0, target=0.5), ZLoss(strength=1.0)], ids=repr
)
def test_a_causal_penalty_makes_no_matrix_of_allowed_keys(method, monkeypatch):
    q, k, v = (torch.randn(2, 3, 40, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    wanted = attend_with([method], q, k, v, causal=True, form="textbook")[1]
    monkeypatch.setattr(Call, "allowed", lambda call: pytest.fail("a matrix of allowed keys is made"))
    torch.testing.assert_close(attend_with([method], q, k, v, causal=True)[1], wanted)


@pytest.mark.parametrize("queries", [slice(0, 40), slice(7, 19)])
def test_counts_of_a_causal_call_are_those_of_its_matrix(queries):
    q, k = torch.zeros(1, 1, 40, 8), torch.zeros(1, 1, 33, 8)
    layer = SimpleNamespace(site=SimpleNamespace(is_cross=False))
    call = Call(layer, q, k, k, causal=True).block(queries)
    assert torch.equal(call.allowed_counts(), call.allowed().sum(-1, keepdim=True).float())
