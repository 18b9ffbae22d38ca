"""SpectralCap: singular values cut at a limit after each step, as written by a decomposition, and what it refuses."""

import pytest
import torch
from methods.weight_hosts import ids, model
from small_models import HOSTS, fresh

import headwise
from headwise import InterleavedHeads, QKClip, SigmaReparam, SpectralCap, SpectralNorm, WeightNorm
from headwise.attend.methods import spectral_cap
from headwise.attend.projections import spectral_cuts, together
from headwise.attend.projections.spectral_cuts import cut_by_signs, cut_by_values


def alone_by_signs(matrix, limit):
    """Cut one matrix by products."""
    return cut_by_signs(matrix[None], limit)[0]


def capped(weight, limit):
    """Write the cap out."""
    u, s, v = torch.linalg.svd(weight.detach(), full_matrices=False)
    return u @ torch.diag(s.clamp(max=limit)) @ v


def test_after_a_step_each_block_has_its_singular_values_cut_at_the_limit():
    net = model()
    handle = headwise.regularize(net, SpectralCap(limit=0.5))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    net(ids())
    handle.after_step()
    for i in range(2):
        fused, out = f"layers.{i}.c_attn.weight", f"layers.{i}.c_proj.weight"
        now = dict(net.named_parameters())
        for part, wanted in zip(now[fused].chunk(3), before[fused].chunk(3), strict=True):
            torch.testing.assert_close(part, capped(wanted, 0.5))
            assert not torch.allclose(part, wanted) and torch.linalg.matrix_norm(part, 2) < 0.5001
        torch.testing.assert_close(now[out], capped(before[out], 0.5))
    untouched = [n for n in before if "c_attn.weight" not in n and "c_proj.weight" not in n]
    assert untouched and all(torch.equal(dict(net.named_parameters())[n], before[n]) for n in untouched)


@pytest.mark.parametrize("limit", [0.01, 0.3, 1.0, 8.0, 1e30])
@pytest.mark.parametrize("shape", [(8, 8), (64, 16), (16, 64), (96, 96), (32, 1), (1, 32)])
def test_products_of_matrices_cut_as_the_decomposition_does(shape, limit):
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(shape, generator=generator)
    low = full[:, :1] @ torch.randn(1, shape[1], generator=generator)
    for weight in (full, low, torch.zeros(shape), torch.eye(*shape) * min(limit, 2.0)):
        exact = capped(weight.double(), limit)
        found = alone_by_signs(weight, limit)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-7 * float(torch.linalg.matrix_norm(exact, 2)))
        if torch.linalg.matrix_norm(weight, 2) < limit:
            assert torch.equal(found, weight)
        # what is cut is not cut again, but for the rounding of the result
        torch.testing.assert_close(alone_by_signs(found, limit), found, rtol=1e-6, atol=1e-6 * limit)


def test_a_model_is_cut_alike_by_both(monkeypatch):
    for how in (cut_by_values, alone_by_signs):
        net = model()
        handle = headwise.regularize(net, SpectralCap(limit=0.5))
        monkeypatch.setattr(spectral_cap, "cut_by_values", how)
        net(ids())
        handle.after_step()
        found = {name: p.detach().clone() for name, p in net.named_parameters()}
        if how is cut_by_values:
            wanted = found
    assert all(torch.equal(p, wanted[n]) for n, p in found.items() if "c_" not in n)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("stacked", [1, 1 << 25])
@pytest.mark.parametrize("host", ["own", "llama"])
def test_stacked_matrices_are_cut_like_each_alone(host, stacked, monkeypatch):
    monkeypatch.setattr(spectral_cuts, "STACKED", stacked)
    cut, found = [], []
    signs = spectral_cuts.cut_by_signs
    monkeypatch.setattr(spectral_cuts, "cut_by_signs", lambda x, limit: cut.append(len(x)) or signs(x, limit))
    for where in (("cpu",), ()):
        monkeypatch.setattr(together, "TOGETHER_ON", where)
        net = fresh(HOSTS[host])
        handle = headwise.regularize(net, SpectralCap(limit=0.1, layers="all"))
        HOSTS[host].run(net)
        handle.after_step()
        found.append(dict(net.named_parameters()))
    assert max(cut) == 1 if stacked == 1 else max(cut) >= 4
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6)


def test_what_lies_below_the_limit_keeps_its_bits():
    net = model()
    handle = headwise.regularize(net, SpectralCap(limit=100.0))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    net(ids())
    handle.after_step()
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


@pytest.mark.parametrize(
    ("of", "names"),
    [("qk", ["q_proj", "k_proj"]), ("vo", ["v_proj", "o_proj"]), ("qkvo", ["q_proj", "k_proj", "v_proj", "o_proj"])],
)
def test_only_the_chosen_matrices_are_capped(of, names):
    net = fresh(HOSTS["llama"])
    handle = headwise.regularize(net, SpectralCap(limit=0.1, of=of))
    attention = net.model.layers[1].self_attn
    before = {n: getattr(attention, n).weight.detach().clone() for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
    HOSTS["llama"].run(net)
    handle.after_step()
    for name, was in before.items():
        torch.testing.assert_close(getattr(attention, name).weight.detach(), capped(was, 0.1) if name in names else was)


def test_all_layers_means_the_mlp_and_the_head_too():
    net = fresh(HOSTS["own"])
    handle = headwise.regularize(net, SpectralCap(limit=0.2, layers="all"))
    HOSTS["own"].run(net)
    handle.after_step()
    for name, p in net.named_parameters():
        if p.dim() == 2:
            parts = p.chunk(3) if "qkv" in name else [p]
            assert all(torch.linalg.matrix_norm(part, 2) < 0.2001 for part in parts), name


def test_it_learns_nothing_and_leaves_nothing():
    net = model()
    keys, attributes = list(net.state_dict()), [set(m.__dict__) for m in net.modules()]
    handle = headwise.regularize(net, SpectralCap(limit=0.1))
    assert list(net.state_dict()) == keys
    net(ids())
    handle.after_step()
    handle.remove(discard=True)
    assert [set(m.__dict__) for m in net.modules()] == attributes


def test_half_precision_is_cut_in_full_precision():
    net = model().to(torch.bfloat16)
    before = net.layers[0].c_proj.weight.detach().clone()
    handle = headwise.regularize(net, SpectralCap(limit=0.3))
    net(ids())
    handle.after_step()
    assert torch.equal(net.layers[0].c_proj.weight, capped(before.float(), 0.3).to(torch.bfloat16))


@pytest.mark.parametrize("other", [InterleavedHeads(), SigmaReparam(), SpectralNorm(), WeightNorm()], ids=repr)
@pytest.mark.parametrize("first", [True, False])
def test_a_parametrization_of_the_same_weights_is_refused_in_both_orders(other, first):
    methods = [SpectralCap(), other] if first else [other, SpectralCap()]
    with pytest.raises(ValueError, match=r"layers\.0.*use one of them") as told:
        headwise.regularize(model(), *methods)
    assert "SpectralCap" in str(told.value) and type(other).__name__ in str(told.value)


def test_qk_clip_acts_beside_it():
    net = model()
    handle = headwise.regularize(net, QKClip(threshold=0.01), SpectralCap(limit=0.5))
    net(ids())
    handle.after_step()
    assert torch.linalg.matrix_norm(net.layers[0].c_attn.weight[:24], 2) < 0.5


def test_frozen_weights_are_refused_by_name():
    net = model()
    net.layers[1].c_attn.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers\.1.*c_attn\.weight, which is frozen"):
        headwise.regularize(net, SpectralCap(), where=lambda site: site.depth == 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0.0}, "limit must be above 0, got 0"),
        ({"of": "qx"}, "of must be one of 'qk', 'vo', 'qkvo'"),
        ({"of": ""}, "of must be one of"),
        ({"of": "qq"}, "of must be one of"),
        ({"layers": "mlp"}, "layers must be one of"),
        ({"layers": "all", "of": "qk"}, 'layers="all" caps every matrix'),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        SpectralCap(**settings)


def test_a_matrix_just_above_its_limit_is_cut():
    # a Frobenius norm a little above the limit says nothing yet
    cut = cut_by_values(torch.diag(torch.tensor([1.5, 0.2])), 1.0)
    torch.testing.assert_close(cut, torch.diag(torch.tensor([1.0, 0.2])))
