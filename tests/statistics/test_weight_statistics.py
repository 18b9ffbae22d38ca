"""Weight statistics agree with SVDs of the full products, and the low-rank laws of weight decay hold in them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from headwise.attend.core.site import Site
from headwise.health.statistics.weights import WEIGHT_STATISTICS, Product, read_weights, weight_reading, weight_reasons
from headwise.health.statistics.weights.balance import conserved
from headwise.health.statistics.weights.ranks import PseudoRank

F64 = torch.float64


def product(heads: int = 4, groups: int = 4, size: int = 6, width: int = 20, seed: int = 0, **options) -> Product:
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: (
        torch.randn(n, size, width, generator=g, dtype=F64) * torch.logspace(0, -2, size, dtype=F64)[:, None]
    )
    return Product("qk", draw(heads), draw(groups), **options)


def full(p: Product) -> Tensor:
    return p.own.mT @ p.shared.repeat_interleave(p.heads // p.groups, 0)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_figures_are_those_of_the_full_products(groups):
    p = product(groups=groups)
    values = torch.linalg.svdvals(full(p))
    total = values.sum(-1)
    share = values / total[:, None]
    want = {
        "spectral_norm": values[:, 0],
        "frobenius_norm": full(p).square().sum((-1, -2)).sqrt(),
        "nuclear_norm": total,
        "stable_rank": full(p).square().sum((-1, -2)) / values[:, 0].square(),
        "effective_rank": torch.exp(-(share * share.clamp(min=1e-300).log()).sum(-1)),
        # the upper three of six eigenvalues, over the smallest of them
        "alpha_hill": 1 + 3 / (values[:, :3] / values[:, 2:3]).square().log().sum(-1),
        "pseudo_rank": torch.tensor(
            [next(k for k in range(1, 21) if v[:k].sum() >= 0.95 * v.sum()) / 6 for v in values], dtype=F64
        ),
    }
    for name, expected in want.items():
        torch.testing.assert_close(WEIGHT_STATISTICS[name]().of(p), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("groups", [4, 2])
def test_balance_and_gap_are_those_of_groups(groups):
    p, each = product(groups=groups), 4 // groups
    for g in range(groups):
        heads = range(g * each, (g + 1) * each)
        own = sum(p.own[h] @ p.own[h].T for h in heads)
        shared = p.shared[g] @ p.shared[g].T
        share = torch.linalg.matrix_norm(own - shared) / (
            torch.linalg.matrix_norm(own) + torch.linalg.matrix_norm(shared)
        )
        torch.testing.assert_close(WEIGHT_STATISTICS["imbalance"]().of(p)[g], share)
        joined = torch.cat([p.own[h].T @ p.shared[g] for h in heads])
        half = 0.5 * (own.trace() + shared.trace())
        gap = (half - torch.linalg.svdvals(joined).sum()) / half
        torch.testing.assert_close(WEIGHT_STATISTICS["nuclear_gap"]().of(p)[g], gap)
        ranks = [
            next(k for k in range(1, 7) if values[:k].sum() >= 0.95 * values.sum())
            for values in map(torch.linalg.svdvals, (own, shared))
        ]
        assert WEIGHT_STATISTICS["rank_gap"]().of(p)[g].item() == pytest.approx(abs(ranks[0] - ranks[1]) / 6)


def test_the_ranks_of_factors_of_known_rank_are_as_far_apart_as_made():
    basis = torch.linalg.qr(torch.randn(20, 6, dtype=F64, generator=torch.Generator().manual_seed(1)))[0].T
    lower = basis.clone()
    lower[2:] = 0
    for own, shared in ((basis, lower), (lower, basis)):
        assert WEIGHT_STATISTICS["rank_gap"]().of(Product("vo", own[None], shared[None])).item() == pytest.approx(4 / 6)


def test_zero_weights_give_zeros_and_no_nan():
    zero = torch.zeros(2, 3, 8)
    p = Product("qk", zero, zero)
    for name, statistic in WEIGHT_STATISTICS.items():
        assert (statistic().of(p) == 0).all(), name


def test_a_diverged_head_reads_as_nan_and_leaves_the_others():
    p = product(groups=2)
    own = p.own.clone()
    own[1, 0, 0] = math.nan
    broken = Product("qk", own, p.shared)
    for name, statistic in WEIGHT_STATISTICS.items():
        good, bad = statistic().of(p), statistic().of(broken)
        ill = [1] if statistic.per == "head" else [0]
        assert bad[ill].isnan().all(), name
        keep = [i for i in range(len(good)) if i not in ill]
        torch.testing.assert_close(bad[keep], good[keep])


def test_a_product_of_known_rank_is_read_as_such():
    basis = torch.linalg.qr(torch.randn(20, 6, dtype=F64, generator=torch.Generator().manual_seed(1)))[0].T
    rows = basis.clone()
    rows[3:] = 0
    p = Product("qk", rows[None], rows[None])
    figures = {name: kind().of(p).item() for name, kind in WEIGHT_STATISTICS.items()}
    assert figures["stable_rank"] == pytest.approx(3)
    assert figures["effective_rank"] == pytest.approx(3)
    assert figures["pseudo_rank"] == pytest.approx(0.5)
    # three equal values have no tail
    assert figures["alpha_hill"] == 0
    assert PseudoRank(of_model=True).of(p).item() == pytest.approx(3 / 20)
    assert figures["imbalance"] == pytest.approx(0)
    assert figures["nuclear_gap"] == pytest.approx(0, abs=1e-9)


def test_single_precision_is_good_to_a_millionth_of_the_largest():
    p = product(size=32, width=96)
    single = Product("qk", p.own.float(), p.shared.float())
    error = (single.spectrum.double() - p.spectrum).abs().amax(-1) / p.spectrum[:, 0]
    assert error.max() < 1e-6


def site_of(module: nn.Module, **facts) -> Site:
    return Site("attn", module, **facts)


def test_a_reading_says_what_its_products_mean():
    module = nn.MultiheadAttention(12, 3)
    plain = weight_reading(site_of(module))
    assert set(plain.products) == {"qk", "vo"}
    assert any("leave out the biases of queries, keys, values and the output" in note for note in plain.notes)
    normed = weight_reading(site_of(module, qk_norm=True))
    assert "does not apply" in weight_reasons(normed)["imbalance_qk"]
    assert "imbalance_vo" in read_weights(normed)
    assert "imbalance_qk" not in read_weights(normed)
    turned = weight_reading(site_of(module, rope=True))
    assert any("at the same position" in note for note in turned.notes)
    assert turned.products["qk"].pairs.tolist() == [[0, 2], [1, 3]]
    assert turned.products["vo"].pairs is None


def test_what_cannot_be_found_has_a_reason_for_every_figure():
    reading = weight_reading(site_of(nn.Module()))
    assert read_weights(reading) == {}
    assert len(weight_reasons(reading)) == 2 * len(WEIGHT_STATISTICS)
    assert all("attn" in reason for reason in weight_reasons(reading).values())


def test_hosts_are_asked_how_they_pair_rotary_rows():
    from transformers.models.cohere.modeling_cohere import CohereAttention
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    from headwise.health.statistics.weights.weight_reading import rotary_pairs

    made = {cls: cls.__new__(cls) for cls in (LlamaAttention, CohereAttention, GPTNeoXAttention)}
    for module in made.values():
        nn.Module.__init__(module)
    assert rotary_pairs(site_of(made[LlamaAttention]), 4).tolist() == [[0, 2], [1, 3]]
    assert rotary_pairs(site_of(made[CohereAttention]), 4).tolist() == [[0, 1], [2, 3]]
    made[GPTNeoXAttention].partial_rotary_factor = 0.5
    assert rotary_pairs(site_of(made[GPTNeoXAttention]), 4).tolist() == [[0, 1], [2, 2], [3, 3]]


# The laws of weight decay (Kobayashi et al. 2024), with the factors as a head's queries and keys.


def descend(loss, factors: list[Tensor], decay: float, steps: int, rate: float) -> list[Tensor]:
    """Follow the gradient of loss + decay/2 * sum of squares."""
    factors = [f.clone() for f in factors]
    for _ in range(steps):
        leaves = [f.detach().requires_grad_() for f in factors]
        grads = torch.autograd.grad(loss(*leaves), leaves)
        factors = [(f - rate * (g + decay * f)).detach() for f, g in zip(factors, grads, strict=True)]
    return factors


def factors_of(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [0.5 * torch.randn(*shape, generator=g, dtype=F64) for shape in shapes]


def test_decayed_factors_keep_singular_values_softly_thresholded():
    decay = 0.3
    g = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(5, 5, generator=g, dtype=F64))[0] for _ in range(2))
    values = torch.tensor([2.0, 1.2, 0.7, 0.25, 0.1], dtype=F64)
    target = left @ values.diag() @ right.T
    a, b = descend(lambda a, b: 0.5 * (a.T @ b - target).square().sum(), factors_of((5, 5), (5, 5)), decay, 6000, 0.1)
    p = Product("qk", a[None], b[None])
    torch.testing.assert_close(p.spectrum[0], (values - decay).clamp(min=0), rtol=0, atol=1e-5)
    assert WEIGHT_STATISTICS["nuclear_gap"]().of(p).item() == pytest.approx(0, abs=1e-4)


def test_imbalance_falls_as_the_law_says():
    decay, time, rate = 0.4, 2.0, 1e-3
    target = factors_of((6, 7), seed=5)[0]
    start = factors_of((4, 6), (4, 7), seed=1)
    end = descend(lambda a, b: 0.5 * (a.T @ b - target).square().sum(), start, decay, int(time / rate), rate)
    before, after = (
        own - shared for own, shared in (conserved(Product("qk", a[None], b[None])) for a, b in (start, end))
    )
    torch.testing.assert_close(after, before * math.exp(-2 * decay * time), rtol=0.02, atol=2e-3)


def test_under_grouped_queries_the_group_sum_balances_and_single_heads_do_not():
    targets = factors_of((6, 7), (6, 7), seed=3)

    def loss(own, shared):
        return sum(0.5 * (own[h].T @ shared[0] - targets[h]).square().sum() for h in range(2))

    own, shared = descend(loss, factors_of((2, 4, 6), (1, 4, 7), seed=4), 0.1, 3000, 0.02)
    p = Product("qk", own, shared)
    assert WEIGHT_STATISTICS["imbalance"]().of(p).item() < 1e-4
    alone = Product("qk", own[:1], shared)
    assert WEIGHT_STATISTICS["imbalance"]().of(alone).item() > 0.05


def test_with_rotary_positions_only_the_traces_of_pairs_balance():
    pairs = torch.tensor([[0, 2], [1, 3]])
    target = factors_of((3, 6, 6), seed=6)[0] * 2

    def turned(x, angle):
        c, s = math.cos(angle), math.sin(angle)
        low, high = x[:2] * torch.tensor([[1.0], [1.0]], dtype=F64), x[2:]
        return torch.cat([c * low - s * high, s * low + c * high])

    def loss(own, shared):
        return sum(0.5 * (own[0].T @ turned(shared[0], 0.9 * t) - target[t]).square().sum() for t in range(3))

    own, shared = descend(loss, factors_of((1, 4, 6), (1, 4, 6), seed=7), 0.1, 3000, 0.01)
    rotary = Product("qk", own, shared, pairs)
    assert WEIGHT_STATISTICS["imbalance"]().of(rotary).item() < 1e-3
    assert WEIGHT_STATISTICS["imbalance"]().of(Product("qk", own, shared)).item() > 0.02


def test_the_gap_is_bounded_by_the_imbalance():
    for seed in range(5):
        p = product(heads=1, groups=1, seed=seed)
        half = 0.5 * (p.own.square().sum() + p.shared.square().sum())
        difference = torch.linalg.svdvals(p.own_gram - p.shared_gram).sum()
        bound = difference.sqrt() * (torch.linalg.matrix_norm(p.own[0]) + torch.linalg.matrix_norm(p.shared[0])) / 2
        assert half - p.spectrum.sum() <= bound
        assert half - p.spectrum.sum() >= 0


@pytest.mark.parametrize("shape", [(5, 8, 8), (3, 4, 9), (3, 9, 4)])
def test_singular_values_by_eigenvalues_as_a_gpu_computes_them(shape):
    from headwise.health.statistics.weights.product import by_eigenvalues

    matrices = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    matrices[0, 0] = matrices[0, 1]
    torch.testing.assert_close(by_eigenvalues(matrices), torch.linalg.svdvals(matrices), rtol=1e-5, atol=1e-6)
