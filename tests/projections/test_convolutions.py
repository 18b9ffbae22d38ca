"""Convolutions under the names of projections: read as matrices of patches where that is what they are, else
refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise import FeatScale, GatedOutput, InputNoise, NuclearDecay, ProductDecay, QKClip, SigmaReparam
from headwise.attend import projections
from headwise.attend.core.site import Site
from headwise.attend.projections import ProjectionError
from headwise.health.statistics.weights import read_weights, weight_reading, weight_reasons

HEADS, SIZE, WIDTH = 2, 4, 6
INNER = HEADS * SIZE


class ConvAttention(nn.Module):
    """Attends over the places of a map (B, C, H, W), with a kernel size and groups for each projection."""

    def __init__(self, kernels: dict[str, int], groups: dict[str, int] | None = None, turned: str = "") -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        for kind, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
            size, several = kernels.get(kind, 1), (groups or {}).get(kind, 1)
            ends = (INNER, WIDTH) if kind == "o" else (WIDTH, INNER)
            make = nn.ConvTranspose2d if kind == turned else nn.Conv2d
            setattr(self, name, make(*ends, size, padding=size // 2, groups=several))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).flatten(2).unflatten(1, (HEADS, SIZE)).mT for m in (self.q_proj, self.k_proj, self.v_proj))
        o = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(o.mT.flatten(1, 2).unflatten(-1, x.shape[-2:]))


class Model(nn.Module):
    def __init__(self, **kinds) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = ConvAttention(**kinds)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


X = torch.randn(2, WIDTH, 3, 4, generator=torch.Generator().manual_seed(1))
EVERY = {"q": 3, "k": 3, "v": 3, "o": 3}


def test_a_block_maps_patches_as_its_convolution_does():
    attn = ConvAttention({"q": 3, "o": 3})
    found = projections.find(Site("attn", attn))
    patches = F.unfold(X, 3, padding=1)
    made = found.q.weight() @ patches + found.q.bias()[:, None]
    torch.testing.assert_close(made, attn.q_proj(X).flatten(2))
    # Of the output a row is an input: what one channel alone gives.
    kernel = torch.zeros(1, INNER, 3, 3)
    kernel[0, 5, 1, 1] = 1.0
    alone = (attn.out_proj(kernel) - attn.out_proj(torch.zeros_like(kernel)))[0]
    torch.testing.assert_close(found.o.weight()[5].view(WIDTH, 3, 3).flip(1, 2), alone)
    assert (found.q.width, found.k.width, found.o.width) == (WIDTH, WIDTH, WIDTH)


def test_sigma_is_that_of_the_matrix_of_patches():
    model = Model(kernels=EVERY)
    plain = model(X)
    true = {
        n: torch.linalg.matrix_norm(getattr(model.attn, n).weight.detach().flatten(1), 2)
        for n in ("q_proj", "out_proj")
    }
    handle = headwise.regularize(model, SigmaReparam(), example=X)
    for name, sigma in true.items():
        gamma = getattr(model.attn, name).parametrizations.weight[0].gamma
        torch.testing.assert_close(gamma.detach(), sigma[None], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(X), plain, rtol=1e-4, atol=1e-5)
    model.train()(X)
    handle.after_step()
    handle.fold()
    torch.testing.assert_close(model(X), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [ProductDecay(strength=1.0), NuclearDecay(strength=1.0)], ids=repr)
def test_products_of_patches_are_penalised_and_an_output_of_several_places_is_refused(method):
    with pytest.raises(
        ValueError,
        match=r"needs the output projection as one matrix; attn makes its o by attn\.out_proj, a convolution over "
        r"\(3, 3\)",
    ):
        headwise.regularize(Model(kernels={"o": 3}), method, example=X)
    model = Model(kernels={"q": 3, "v": 3})
    handle = headwise.regularize(model, method, example=X)
    model.train()(X)
    q, k, v = (getattr(model.attn, f"{n}_proj").weight.detach().flatten(1).unflatten(0, (HEADS, SIZE)) for n in "qkv")
    o = model.attn.out_proj.weight.detach().flatten(1).t().unflatten(0, (HEADS, SIZE))
    spectra = [torch.linalg.svdvals(a.mT @ b) for a, b in ((k, q), (o, v))]
    wanted = sum(s.sum() if isinstance(method, NuclearDecay) else 0.5 * s.square().sum() for s in spectra)
    torch.testing.assert_close(handle.loss().detach(), wanted, rtol=1e-5, atol=1e-5)


def test_figures_of_weights_are_those_of_patches_or_missing_with_the_reason():
    attn = ConvAttention({"q": 3, "k": 3, "o": 3})
    reading = weight_reading(Site("attn", attn))
    figures, reasons = read_weights(reading), weight_reasons(reading)
    q, k = (getattr(attn, f"{n}_proj").weight.detach().flatten(1).unflatten(0, (HEADS, SIZE)) for n in "qk")
    torch.testing.assert_close(figures["spectral_norm_qk"], torch.linalg.matrix_norm(k.mT @ q, 2), rtol=1e-5, atol=1e-6)
    assert not any(name.endswith("_vo") for name in figures)
    assert "attn.out_proj, a convolution over (3, 3)" in reasons["spectral_norm_vo"]


GROUPED = {"q": 2, "k": 2, "v": 2, "o": 2}


@pytest.mark.parametrize("method", [SigmaReparam(), ProductDecay(), NuclearDecay()], ids=repr)
@pytest.mark.parametrize("kind", ["q", "o"])
def test_grouped_convolutions_are_no_matrix_and_refused_by_name(method, kind):
    model = Model(kernels={}, groups={kind: 2})
    name = "out_proj" if kind == "o" else f"{kind}_proj"
    with pytest.raises(ValueError, match=rf"attn makes its {kind} by attn\.{name}, a grouped convolution \(groups=2\)"):
        headwise.regularize(model, method, example=X)
    with pytest.raises(ProjectionError, match=rf"attn\.{name} is a grouped convolution"):
        getattr(projections.find(Site("attn", model.attn)), kind).weight()


def test_weights_of_grouped_convolutions_are_not_read():
    reading = weight_reading(Site("attn", ConvAttention({}, GROUPED)))
    assert read_weights(reading) == {}
    assert "grouped convolution" in reading.missing["qk"] and "grouped convolution" in reading.missing["vo"]


def test_noise_through_a_projection_of_patches_is_refused():
    with pytest.raises(ValueError, match=r"attn makes its q by attn\.q_proj, a convolution over \(3, 3\)"):
        headwise.regularize(Model(kernels={"q": 3}), InputNoise(per_head=True), example=X)


@pytest.mark.parametrize("kinds", [{"kernels": EVERY}, {"kernels": EVERY, "groups": GROUPED}], ids=["3x3", "grouped"])
def test_methods_that_need_rows_of_heads_alone_act_on_every_convolution(kinds):
    model = Model(**kinds)
    handle = headwise.regularize(model, QKClip(threshold=1e-3), FeatScale(), GatedOutput(), example=X)
    before = model.attn.q_proj(X)
    model.train()(X)
    largest = handle.fitted[0].states[0].tensor("largest").clone()
    handle.after_step()
    factor = ((1e-3 / largest) ** 0.5).repeat_interleave(SIZE)[:, None, None]
    torch.testing.assert_close(model.attn.q_proj(X), before * factor, rtol=1e-4, atol=1e-6)
    assert handle.fitted[0].states[1].tensor("mean_gain").shape == (WIDTH,)


def test_transposed_convolutions_are_refused_by_name():
    with pytest.raises(ProjectionError, match=r"attn has attn\.q_proj, a transposed convolution"):
        projections.find(Site("attn", ConvAttention({}, turned="q")))
    assert "a transposed convolution" in projections.find(Site("attn", ConvAttention({}, turned="o"))).missing["o"]


def test_the_floor_of_the_entropy_is_not_taken_from_patches():
    model = Model(kernels={"q": 3})
    watch = headwise.watch(model, every=1, on_alert=None)
    model.train()(X)
    watch.step()
    assert "a convolution over (3, 3)" in watch.reasons()["attn"]["entropy_floor_spectral"]
    watch.remove()
