"""Figures that have no unit do not depend on that of their inputs, and sharp attention loses no digits of them."""

import dataclasses
import math

import pytest
import statistic_definitions
import torch
from statistic_calls import call_names, reading
from statistic_definitions import Whole
from torch import Tensor

from headwise import sharpness
from headwise.health.statistics import STATISTICS, Reading, read, scan
from headwise.health.statistics.weights import WEIGHT_STATISTICS, Product
from headwise.health.watching.weights import gram_coefficients, norm_in, spectral_norms
from headwise.numerics.precision import directions, magnitude, norms

FACTORS = (1e-25, 1e-12, 1e12, 1e25)
TOKENS = ("hidden", "stream", "final")
# The figures in units of the inputs, with the power of the unit.
NORMS = {"query_norm": "q", "key_norm": "k", "value_norm": "v", "output_norm": "output"}
SHARES = [name for name, kind in WEIGHT_STATISTICS.items() if not kind.unit.startswith("weight")]


def scaled(found: Reading, *fields: str, by: float) -> Reading:
    return dataclasses.replace(found, **{name: getattr(found, name) * by for name in fields})


def values(found: Reading, names: list[str], before: Reading | None = None) -> dict[str, Tensor]:
    tallies = read(found, names, previous=before)
    return {name: STATISTICS[name]().finish(tally).double() for name, tally in tallies.items()}


def assert_close(got: Tensor, expected: Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=rtol, atol=0, equal_nan=True)


def gradient_cosine(whole: Whole) -> Tensor:
    """The definition without each query's own key, so that nothing underflows in fp64 either."""
    found = whole.reading
    keys = found.k.repeat_interleave(found.heads // found.k.shape[1], 1)
    own = torch.eye(found.queries, dtype=torch.bool)
    differences = whole.v[:, :, :, None] - whole.v[:, :, None]
    sums = []
    for maps in (whole, Whole(dataclasses.replace(found, q=keys))):
        others = maps.logits.masked_fill(own, -math.inf).softmax(-1).nan_to_num(0.0)
        sums.append((others[..., None] * differences).sum(-2))
    cosines = torch.nn.functional.cosine_similarity(*sums, dim=-1, eps=0).nan_to_num(0.0)
    return whole.mean(cosines, whole.real & (whole.counts > 1))


@pytest.mark.parametrize("sharp", [1, 4, 12, 60])
@pytest.mark.parametrize("kind", [kind for kind in call_names() if kind != "cross"])
def test_sharp_attention_has_the_cosine_of_its_gradients(kind, sharp):
    found = scaled(reading(kind), "q", "k", by=sharp)
    got = values(found, ["gradient_cosine"])["gradient_cosine"]
    torch.testing.assert_close(got, gradient_cosine(Whole(found)), rtol=0, atol=1e-3, equal_nan=True)
    assert got.isnan().all() or got.abs().max() <= 1


@pytest.mark.parametrize("by", FACTORS)
@pytest.mark.parametrize("kind", ["plain", "padded", "grouped", "with sinks"])
def test_cosines_and_shares_do_not_depend_on_units(kind, by):
    found = reading(kind)
    names = ["token_cosine", "stream_cosine", "final_cosine"]
    names += ["high_frequency", "stream_high_frequency", "final_high_frequency", "massive_activations"]
    expected, got = values(found, names), values(scaled(found, *TOKENS, by=by), names)
    for name in names:
        assert_close(got[name], expected[name])
    for name, field in NORMS.items():
        assert_close(values(scaled(found, field, by=by), [name])[name] / by, values(found, [name])[name])
    moved = scaled(found, "v", by=by)
    for name in ("gradient_cosine", "nonlocal_functional"):
        unit = by**2 if name == "nonlocal_functional" else 1
        if 1e-38 < unit < 1e38:
            assert_close(values(moved, [name])[name] / unit, values(found, [name])[name])
    # Logits that do not change, from queries and keys of very different size.
    moved = scaled(scaled(found, "q", by=by), "k", by=1 / by)
    for name in ("logit_bound", "entropy_floor_centred", "attention_entropy"):
        assert_close(values(moved, [name])[name], values(found, [name])[name], rtol=1e-3)


def test_a_floor_of_huge_tokens_is_zero_and_of_tiny_ones_that_of_no_logits():
    found = reading("plain")
    floor = "entropy_floor_spectral"
    assert (values(scaled(found, "hidden", by=1e30), [floor])[floor] == 0).all()
    assert_close(values(scaled(found, "hidden", by=1e-30), [floor])[floor], torch.full((4,), math.log(37)))
    still = dataclasses.replace(scaled(found, "hidden", by=1e30), product_norm=torch.zeros(4))
    assert_close(values(still, [floor])[floor], torch.full((4,), math.log(37)))


@pytest.mark.parametrize("rows", [scan.BLOCK, 37 * 4 * 5])
@pytest.mark.parametrize("kind", ["with sinks", "with sinks and padding"])
def test_a_sink_that_takes_nearly_all_leaves_the_shares_among_the_keys(kind, rows, monkeypatch):
    monkeypatch.setattr(scan, "BLOCK", rows)
    monkeypatch.setattr(scan, "FEWEST_ROWS", 2)
    names = ["head_redundancy", "layer_redundancy", "layer_redundancy_mean", "attention_distance", "gradient_cosine"]
    here, before = (
        dataclasses.replace(reading(kind, seed), sinks=torch.tensor([150.0, 152.0, 200.0, 300.0])) for seed in (0, 7)
    )
    got, whole, previous = values(here, names, before), Whole(here), Whole(before)
    for name in names:
        define = getattr(statistic_definitions, name)
        expected = gradient_cosine(whole) if name == "gradient_cosine" else define(whole, previous)
        torch.testing.assert_close(got[name], expected, rtol=2e-3, atol=2e-3)
    half = dataclasses.replace(here, sinks=torch.full((4,), 20.0))
    assert_close(values(half, ["attention_entropy"])["attention_entropy"], Whole(half).mean(Whole(half).entropy), 1e-3)


def test_values_that_are_all_equal_do_not_move():
    found = reading("plain")
    for value in (0.1, 1e-20, 3e20):
        alike = dataclasses.replace(found, v=torch.full_like(found.v, value))
        assert (values(alike, ["gradient_cosine"])["gradient_cosine"] == 0).all()
        assert (values(alike, ["nonlocal_functional"])["nonlocal_functional"] <= 1e-12 * value**2).all()


def test_padding_of_any_value_changes_no_figure():
    found = reading("padded")
    v = found.v.masked_fill(~found.real_queries[:, None, :, None], 1e30)
    for name in ("gradient_cosine", "nonlocal_functional"):
        assert_close(values(dataclasses.replace(found, v=v), [name])[name], values(found, [name])[name])


def test_the_margin_of_a_sampled_figure_is_in_its_unit():
    found = reading("plain")
    margins = []
    for by in (1, 1e-14):
        tally = read(
            scaled(found, "v", by=by), ["nonlocal_functional"], rows=9, generator=torch.Generator().manual_seed(0)
        )
        tally = tally["nonlocal_functional"]
        margins.append(tally.add(tally).margin().double() / by**2)
    assert_close(*margins)
    assert (margins[0] > 0).all()


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("own", "shared"), [(1e-25, 1e-25), (1e25, 1e25), (1e-30, 1e30), (1e-12, 1e-12)])
def test_ranks_and_balance_of_weights_do_not_depend_on_their_unit(groups, own, shared):
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(4, 6, 20, generator=draw, dtype=torch.float64) * torch.logspace(0, -2, 6)[:, None]
    b = torch.randn(groups, 6, 20, generator=draw, dtype=torch.float64)
    exact, product = Product("qk", a * own, b * shared), Product("qk", (a * own).float(), (b * shared).float())
    for name in SHARES:
        assert_close(WEIGHT_STATISTICS[name]().of(product), WEIGHT_STATISTICS[name]().of(exact))
    if 1e-38 < own * shared < 1e38:
        for name in WEIGHT_STATISTICS:
            assert_close(WEIGHT_STATISTICS[name]().of(product), WEIGHT_STATISTICS[name]().of(exact))
        assert_close(spectral_norms(product.own, product.shared), exact.spectrum[:, 0])
    expected = float(torch.linalg.svdvals(exact.own[0])[0])
    assert norm_in(gram_coefficients(product.own[0])) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("by", [1e-25, 1.0, 1e25])
def test_the_sharpness_of_a_loss_scales_with_it(by):
    weights = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.5]])
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    found = sharpness(lambda: by * (x @ weights @ x) / 2, [x])
    assert found.value / by == pytest.approx((5 + math.sqrt(5)) / 2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_and_directions_of_any_finite_vector(dtype):
    x = torch.tensor([[3.0, 4.0, 0.0]], dtype=dtype)
    for by in (1e-38, 1e-25, 1.0, 1e25, 5e37):
        assert_close(norms(x * by) / by, torch.tensor([5.0]), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert_close(directions(x * by).norm(dim=-1), torch.ones(1))
    assert norms(torch.tensor([[math.inf, 1.0], [math.nan, 1.0]])).isfinite().sum() == 0
    assert not directions(torch.tensor([[math.inf, 1.0], [math.nan, 1.0]])).isfinite().all(-1).any()
    assert (directions(torch.zeros(2, 3)) == 0).all()
    assert norms(torch.zeros(0, 3)).shape == (0,)
    # A power of two, so that dividing by it changes no digit.
    size = magnitude(torch.tensor([[-7.0, 3.0], [0.0, 0.0], [3.4e38, 1.0]]), -1).flatten()
    assert size.tolist() == [4.0, 1.0, 2.0**127]
