"""SigmaReparam: gamma / sigma(W) * W per block, one power iteration per optimizer step, folded bit for bit."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from methods.weight_hosts import WIDTH, ids, loss_of, model
from torch import nn

import headwise
from headwise import QKClip, SigmaReparam, SpectralNorm
from headwise.attend import projections
from headwise.attend.methods.reparametrization import reparametrize, restore
from headwise.attend.projections.block import Block
from headwise.attend.projections.leading import leading
from headwise.attend.projections.spectral import Spectral


def spectral_of(net, layer: int = 0, name: str = "c_attn") -> Spectral:
    return getattr(net.layers[layer], name).parametrizations.weight[0]


@pytest.mark.bits
def test_starting_at_the_current_weights_changes_no_bit():
    net = model()
    before = net(ids())
    headwise.regularize(net, SigmaReparam())
    assert torch.equal(net(ids()), before)


def test_starting_at_one_gives_each_block_spectral_norm_one():
    net = model()
    headwise.regularize(net, SigmaReparam(init="one"))
    for block in net.layers[0].c_attn.weight.split(WIDTH):
        assert torch.linalg.matrix_norm(block, 2).item() == pytest.approx(1.0, abs=1e-5)
    assert torch.linalg.matrix_norm(net.layers[1].c_proj.weight, 2).item() == pytest.approx(1.0, abs=1e-5)
    assert torch.linalg.matrix_norm(net.layers[0].c_attn.weight, 2).item() > 1.01


def test_the_gradient_is_that_of_the_paper_and_stands_at_right_angles_to_the_weight():
    torch.manual_seed(1)
    linear = nn.Linear(6, 9, bias=False)
    block = Block("q", linear, "weight", "weight", slice(0, 9), 3, 3)
    spectral = Spectral(linear.weight, [block], "one")
    weight = linear.weight.detach().clone().requires_grad_()
    upstream = torch.randn(9, 6)
    spectral(weight).backward(upstream)
    sigma = torch.linalg.matrix_norm(weight.detach(), 2)
    outer = torch.outer(spectral.u_q, spectral.v_q)
    want = (upstream - (upstream * weight.detach()).sum() / sigma * outer) / sigma
    torch.testing.assert_close(weight.grad, want, rtol=1e-4, atol=1e-5)
    assert (weight.grad * weight.detach()).sum().abs() < 1e-4


def test_forwards_change_no_state_and_a_step_takes_one_power_iteration():
    net = model()
    handle = headwise.regularize(net, SigmaReparam())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    loss_of(net, ids()).backward()
    optimizer.step()
    spectral, original = spectral_of(net), net.layers[0].c_attn.parametrizations.weight.original
    before = copy.deepcopy(spectral.state_dict())
    for _ in range(2):
        net(ids())
    assert all(torch.equal(spectral.state_dict()[key], before[key]) for key in before)
    handle.after_step()
    block = original.detach()[WIDTH : 2 * WIDTH]
    u = torch.nn.functional.normalize(block @ before["v_k"], dim=0)
    v = torch.nn.functional.normalize(block.t() @ u, dim=0)
    torch.testing.assert_close(spectral.v_k, v)
    torch.testing.assert_close(spectral.u_k, u)


@pytest.mark.bits
def test_folding_gives_plain_weights_with_the_bits_of_the_eval_model():
    net = model()
    keys = list(net.state_dict())
    handle = headwise.regularize(net, SigmaReparam(init="one"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        (loss_of(net, ids(seed=step)) + handle.loss()).backward()
        optimizer.step()
        handle.after_step()
    net.eval()
    before = net(ids())
    handle.fold()
    assert torch.equal(net(ids()), before)
    assert list(net.state_dict()) == keys
    assert type(net.layers[0].c_attn) is nn.Linear


def test_removal_before_a_step_gives_back_the_same_parameter_in_its_place():
    net = model()
    weight, keys, bits = net.layers[0].c_attn.weight, list(net.state_dict()), copy.deepcopy(net.state_dict())
    headwise.regularize(net, SigmaReparam(init="one")).remove()
    assert net.layers[0].c_attn.weight is weight
    assert list(net.state_dict()) == keys
    assert all(torch.equal(net.state_dict()[key], bits[key]) for key in keys)
    assert "_headwise_places" not in net.layers[0].c_attn.__dict__


def test_optimizers_see_the_plain_parameter_and_gamma():
    net = model()
    weight = net.layers[0].c_attn.weight
    headwise.regularize(net, SigmaReparam())
    names = dict(net.named_parameters())
    assert names["layers.0.c_attn.parametrizations.weight.original"] is weight
    assert names["layers.0.c_attn.parametrizations.weight.0.gamma"].shape == (3,)


@pytest.mark.bits
def test_half_precision_computes_sigma_in_fp32():
    net = model()
    headwise.regularize(net, SigmaReparam(init="one"))
    sharp = net.layers[0].c_attn.weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(net.layers[0].c_attn.weight, sharp)
    net.bfloat16()
    assert net.layers[0].c_attn.weight.dtype == torch.bfloat16
    assert (net.layers[0].c_attn.weight.float() - sharp).abs().max() < 0.02


@pytest.mark.bits
@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 14}])
def test_multihead_attention_is_reparametrized_by_blocks(options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, batch_first=True, **options)
    x, y, z = (
        torch.randn(2, 4, 12),
        torch.randn(2, 5, options.get("kdim", 12)),
        torch.randn(2, 5, options.get("vdim", 12)),
    )
    before = module(x, y, z)[0]
    name = "q_proj_weight" if options else "in_proj_weight"
    blocks = projections.of(headwise.Site("attn", module)).blocks
    inside = [b for b in blocks if b.name == name]
    reparametrize(module, name, Spectral(getattr(module, name), inside, "current"))
    assert torch.equal(module(x, y, z)[0], before)
    module.parametrizations[name][0].gamma.data[0] = 0.1
    assert torch.linalg.matrix_norm(getattr(module, name)[:12], 2).item() == pytest.approx(0.1, rel=1e-4)
    assert not torch.equal(module(x, y, z)[0], before)
    restore(module, name, folded=False)
    assert torch.equal(module(x, y, z)[0], before)


def test_a_second_parametrization_is_refused():
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"Linear\.weight is parametrized already by _SpectralNorm"):
        reparametrize(linear, "weight", nn.Identity())


def test_leading_vectors_of_a_large_matrix_converge():
    torch.manual_seed(0)
    matrix = torch.randn(300, 200)
    u, v = leading(matrix)
    assert torch.dot(u, matrix @ v).item() == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(512, 2048), (768, 1536), (1536, 768), (1000, 1000)])
def test_rounding_does_not_add_up_in_leading_vectors(shape):
    """Random matrices twice as long as wide take some fifty steps, after which sigma was too small by 60 %, once."""
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, v = (vector.double() for vector in leading(matrix))
    wide = matrix.double() if shape[0] <= shape[1] else matrix.double().t()
    sigma = float(torch.linalg.eigvalsh(wide @ wide.t())[-1]) ** 0.5
    assert float(u @ matrix.double() @ v) == pytest.approx(sigma, rel=1e-6)


def test_rescaling_by_head_scales_what_is_computed():
    net = model()
    headwise.regularize(net, SigmaReparam(init="one"), QKClip())
    site = headwise.handle(net).fitted[0].site
    before = net.layers[0].c_attn.weight.detach().clone()
    projections.of(site).q.scale_(torch.tensor([0.5, 1.0, 2.0]))
    after = net.layers[0].c_attn.weight.detach()
    scale = torch.tensor([0.5, 1.0, 2.0]).repeat_interleave(8)[:, None]
    torch.testing.assert_close(after[:WIDTH], before[:WIDTH] * scale, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after[WIDTH:], before[WIDTH:], rtol=1e-6, atol=1e-7)


def test_clipping_follows_the_vectors_and_finds_none_anew(monkeypatch):
    net = model()
    handle = headwise.regularize(net, SigmaReparam(), QKClip(threshold=0.01))
    before = net.layers[0].c_attn.weight.detach().clone()
    loss_of(net, ids())
    largest = handle.fitted[0].states[1].tensor("largest").clone()
    monkeypatch.setattr("headwise.attend.projections.spectral.leading", lambda matrix: pytest.fail("a step decomposes"))
    handle.after_step()
    eta = (0.01 / largest).sqrt().repeat_interleave(8)[:, None]
    torch.testing.assert_close(net.layers[0].c_attn.weight.detach()[:24], before[:24] * eta)


def test_an_unknown_start_is_refused():
    with pytest.raises(ValueError, match="init must be one of 'current', 'one', got 'two'"):
        SigmaReparam(init="two")


def largest_norm(net) -> float:
    weights = [layer.c_proj.weight for layer in net.layers]
    weights += [block for layer in net.layers for block in layer.c_attn.weight.split(WIDTH)]
    return max(torch.linalg.matrix_norm(weight.detach(), 2).item() for weight in weights)


def step(net, handle, seed: int) -> None:
    """Take a step that writes other weights, as an optimizer does in a few."""
    loss_of(net, ids())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    handle.after_step()


def average(teacher, student, decay: float) -> None:
    """Average parameters alone, as the code of BYOL and DINO does."""
    for mean, parameter in zip(teacher.parameters(), student.parameters(), strict=True):
        mean.data.mul_(decay).add_((1 - decay) * parameter.detach().data)


@pytest.mark.parametrize("part", ["model", "layers"])
def test_a_teacher_that_averages_parameters_keeps_spectral_norm_one(part):
    net = model()
    handle = headwise.regularize(net, SpectralNorm())
    teacher = copy.deepcopy(net if part == "model" else net.layers)
    teacher.eval()
    for seed in range(40):
        step(net, handle, seed)
        average(teacher, net if part == "model" else net.layers, 0.9)
    net_like = teacher if part == "model" else nn.Module()
    if part == "layers":
        net_like.layers = teacher
    assert largest_norm(net_like) == pytest.approx(1.0, rel=0.05)


@pytest.mark.bits
def test_a_copy_that_is_not_changed_keeps_its_bits_and_one_that_trains_follows_itself():
    net = model()
    handle = headwise.regularize(net, SpectralNorm())
    kept, trained = copy.deepcopy(net), copy.deepcopy(net)
    before = kept.layers[0].c_attn.weight.detach().clone()
    step(trained, headwise.handle(trained), 1)
    vectors = spectral_of(trained).u_q.clone()
    for seed in range(3):
        step(net, handle, seed)
    assert torch.equal(kept.layers[0].c_attn.weight, before)
    assert torch.equal(spectral_of(trained).u_q, vectors)


def test_an_average_written_into_the_model_is_evaluated_and_folded_with_its_own_norm():
    net = model()
    handle = headwise.regularize(net, SpectralNorm())
    step(net, handle, 0)
    mine, vectors = copy.deepcopy(net.state_dict()), spectral_of(net).u_q.clone()
    other = model(seed=1)
    for layer, from_layer in zip(net.layers, other.layers, strict=True):
        for name in ("c_attn", "c_proj"):
            getattr(layer, name).parametrizations.weight.original.data.copy_(getattr(from_layer, name).weight.data)
    assert largest_norm(net) > 2
    net.eval()
    assert largest_norm(net) == pytest.approx(1.0, rel=1e-4)
    average_of = copy.deepcopy(net)
    headwise.handle(average_of).fold()
    assert largest_norm(average_of) == pytest.approx(1.0, rel=1e-4)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(mine[name])
    net.train()
    assert torch.equal(spectral_of(net).u_q, vectors)


def test_vectors_of_a_large_matrix_are_found_in_less_time_than_its_singular_values():
    torch.manual_seed(0)
    matrix = torch.randn(1024, 1024)
    times = {}
    for name, run in (("values", torch.linalg.svdvals), ("vectors", leading)):
        run(matrix)
        start = time.perf_counter()
        result = run(matrix)
        times[name] = time.perf_counter() - start
        if name == "vectors":
            u, v = (x.double() for x in result)
    assert times["vectors"] < times["values"]
    assert float(u @ matrix.double() @ v) == pytest.approx(
        float(torch.linalg.matrix_norm(matrix.double(), 2)), rel=1e-5
    )


@pytest.mark.parametrize(
    "values", [[3.0] + [1.0] * 199, [2.0] * 150, [1.0] + [0.0] * 149, [1 - i * 1e-5 for i in range(200)]]
)
def test_vectors_are_found_whatever_the_singular_values(values):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(300, len(values)))[0] for _ in range(2))
    matrix = left * torch.tensor(values) @ right.t()
    u, v = leading(matrix)
    assert u.norm().item() == pytest.approx(1, abs=1e-5) and v.norm().item() == pytest.approx(1, abs=1e-5)
    assert float(u @ matrix @ v) == pytest.approx(values[0], rel=1e-4)
