import itertools

import pytest
import torch
from naive import PADDING, logits_of, penalty, qkv, weights

from headwise.attend.core.site import Site
from headwise.attend.methods import Decorrelation


def pairwise(a):
    """Write out Σ_{i<j} ‖A_iᵀA_j‖² / N², averaged over samples."""
    products = [(a[:, i].mT @ a[:, j]).square().mean((1, 2)) for i, j in itertools.combinations(range(a.shape[1]), 2)]
    return torch.stack(products).sum(0).mean()


@pytest.mark.parametrize("n", [6, 9])
def test_the_gram_form_equals_the_pairwise_sum(n):
    q, k, v = qkv(h=4, n=n)
    found = penalty(Decorrelation(strength=3.0), q, k, v, cross=n != 6)
    torch.testing.assert_close(found, 3 * pairwise(weights(q, k)))


def test_it_measures_columns_and_not_likeness_of_heads():
    n = 16
    eye, other = torch.eye(n), torch.eye(n)[torch.randperm(n, generator=torch.Generator().manual_seed(1))]
    one, two = torch.zeros(n, n), torch.zeros(n, n)
    one[:, 0], two[:, 5] = 1, 1
    uniform = torch.full((n, n), 1 / n)
    cases = [(eye, eye, 1 / n), (eye, other, 1 / n), (uniform, uniform, 1 / n**2), (one, one, 1.0), (one, two, 1.0)]
    for first, second, wanted in cases:
        q, k = logits_of(torch.stack([first, second])[None])
        assert float(penalty(Decorrelation(), q, k, k)) == pytest.approx(wanted, rel=1e-4)


def test_padding_does_not_count():
    q, k, v = qkv()
    alone = penalty(Decorrelation(), q[1:, :, :4], k[1:, :, :4], v[1:, :, :4])
    torch.testing.assert_close(penalty(Decorrelation(), q[1:], k[1:], v[1:], mask=PADDING[1:]), alone)


def test_probes_estimate_without_bias():
    q, k, v = qkv(b=1, h=3, t=5, n=8)
    method = Decorrelation(probes=4)
    found = torch.stack([penalty(method, q, k, v, cross=True, seed=seed) for seed in range(1500)])
    wanted = pairwise(weights(q, k))
    error = found.std() / len(found) ** 0.5
    assert error < 0.03 * wanted
    assert (found.mean() - wanted).abs() < 3.5 * error


def test_one_probe_shared_by_all_heads_would_be_biased():
    q, k, _ = qkv(b=1, h=3, t=5, n=8)
    a, wanted = weights(q, k)[0], pairwise(weights(q, k))
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(1500):
        seen = a @ (torch.randint(0, 2, (8, 4), generator=g) * 2.0 - 1)
        found.append(sum((seen[i].mT @ seen[j]).square().mean() for i, j in itertools.combinations(range(3), 2)) / 64)
    found = torch.stack(found)
    assert (found.mean() - wanted).abs() > 6 * found.std() / len(found) ** 0.5


@pytest.mark.grid
def test_probes_carry_a_gradient_that_points_with_the_exact_one():
    q, k, v = qkv(b=1, h=3, t=6)
    grads = []
    for method in (Decorrelation(), Decorrelation(probes=4096)):
        leaf = q.clone().requires_grad_()
        penalty(method, leaf, k, v).backward()
        grads.append(leaf.grad.flatten())
    assert torch.cosine_similarity(*grads, dim=0) > 0.95


def test_a_single_head_is_refused():
    assert "only one" in Decorrelation().refuse(Site("x", torch.nn.Module(), heads=1))
    assert Decorrelation().refuse(Site("x", torch.nn.Module(), heads=2)) is None


@pytest.mark.parametrize("causal", [False, True])
def test_rows_estimate_without_bias(causal):
    q, k, v = qkv(b=1, h=3, t=8, n=8)
    method = Decorrelation(rows=4)
    found = torch.stack([penalty(method, q, k, v, causal=causal, seed=seed) for seed in range(1500)])
    wanted = penalty(Decorrelation(), q, k, v, causal=causal)
    error = found.std() / len(found) ** 0.5
    assert 0 < error < 0.03 * wanted
    assert (found.mean() - wanted).abs() < 3.5 * error


@pytest.mark.parametrize("rows", [4, 5])
def test_rows_of_padded_samples_estimate_without_bias(rows):
    q, k, v = qkv()
    found = torch.stack([penalty(Decorrelation(rows=rows), q, k, v, mask=PADDING, seed=seed) for seed in range(1500)])
    wanted = penalty(Decorrelation(), q, k, v, mask=PADDING)
    error = found.std() / len(found) ** 0.5
    assert error < 0.03 * wanted
    assert (found.mean() - wanted).abs() < 3.5 * error + 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_all_rows_are_the_exact_penalty(causal, padded):
    q, k, v = qkv()
    more = {"causal": causal} | ({"mask": PADDING} if padded else {})
    found = penalty(Decorrelation(rows=100), q, k, v, **more)
    torch.testing.assert_close(found, penalty(Decorrelation(), q, k, v, **more))


def test_rows_are_whole_numbers_and_no_probes():
    with pytest.raises(ValueError, match=r"rows must be a whole number from 2, or None, got 1"):
        Decorrelation(rows=1)
    with pytest.raises(ValueError, match="give probes or rows, not both"):
        Decorrelation(rows=4, probes=4)


def test_probes_must_be_a_whole_number():
    with pytest.raises(ValueError, match=r"probes must be a whole number from 1, or None, got 2.5"):
        Decorrelation(probes=2.5)
