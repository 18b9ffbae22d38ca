"""InterleavedHeads: projections mixed over heads as written in the paper, folding, and what stands beside it."""

import pytest
import torch
from methods.weight_hosts import ids, model
from small_models import HOSTS, fresh

import headwise
from headwise import InterleavedHeads, QKClip, SigmaReparam, WeightNorm


def mixed(weight, mix, heads):
    """Write the mix out: head h is the sum of all heads, each by mix[h, g]."""
    parts = weight.detach().chunk(heads)
    return torch.cat([sum(mix[h, g] * parts[g] for g in range(heads)) for h in range(heads)])


@pytest.mark.parametrize("values", [True, False])
def test_each_head_is_projected_by_a_mix_of_all_heads_weights(values):
    plain, net = fresh(HOSTS["llama"]), fresh(HOSTS["llama"])
    handle = headwise.regularize(net, InterleavedHeads(values=values, spread=0.4))
    attention = net.model.layers[0].self_attn
    for name, heads, block in (("q_proj", 4, "q"), ("k_proj", 2, "k"), ("v_proj", 2, "v")):
        layer, before = getattr(attention, name), getattr(plain.model.layers[0].self_attn, name).weight
        if block == "v" and not values:
            assert torch.equal(layer.weight, before)
            continue
        mix = torch.eye(heads) + getattr(layer.parametrizations.weight[0], f"off_{block}").detach()
        assert not torch.equal(mix, torch.eye(heads))
        torch.testing.assert_close(layer.weight.detach(), mixed(before, mix, heads))
    assert torch.equal(attention.o_proj.weight, plain.model.layers[0].self_attn.o_proj.weight)
    handle.remove()


def test_queries_and_keys_mixed_behind_rotary_positions_are_the_same():
    host = HOSTS["llama"]
    plain, net = fresh(host), fresh(host)
    headwise.regularize(net, InterleavedHeads(spread=0.3))
    layers = [(a.self_attn, b.self_attn) for a, b in zip(plain.model.layers, net.model.layers, strict=True)]

    # The plain model with the mix applied to its queries, keys and values, as the paper writes it.
    def mixing(mix, heads):
        return lambda _, __, out: torch.einsum("hg,btgd->bthd", mix, out.unflatten(-1, (heads, -1))).flatten(2)

    for before, after in layers:
        for name, block, heads in (("q_proj", "q", 4), ("k_proj", "k", 2), ("v_proj", "v", 2)):
            off = getattr(getattr(after, name).parametrizations.weight[0], f"off_{block}").detach()
            getattr(before, name).register_forward_hook(mixing(torch.eye(heads) + off, heads))
    torch.testing.assert_close(host.run(net), host.run(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.bits
@pytest.mark.parametrize("groups", [3, 1])
def test_it_starts_at_the_identity_and_folds_to_the_bit_after_training(groups):
    net, plain = model(groups=groups), model(groups=groups)
    handle = headwise.regularize(net, InterleavedHeads())
    torch.testing.assert_close(net(ids()), plain(ids()))
    off = [p for n, p in net.named_parameters() if "off_" in n]
    assert len(off) == 6 and not any(p.any() for p in off)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net(ids()).square().mean().backward()
    # one head alone has nothing to be mixed with but itself
    assert all(p.grad.any() for p in off)
    optimizer.step()
    handle.after_step()
    net.eval()
    before = net(ids())
    handle.fold()
    assert torch.equal(net(ids()), before) and list(net.state_dict()) == list(plain.state_dict())


def test_weight_decay_pulls_the_mix_to_the_identity():
    net = model()
    headwise.regularize(net, InterleavedHeads(spread=0.5))
    found = {n: p for n, p in net.named_parameters() if "off_" in n}
    groups = headwise.parameter_groups(net, lr=0.1, weight_decay=0.5)
    places = {id(p): g["name"] for g in groups for p in g["params"]}
    assert {places[id(p)] for p in found.values()} <= {"attention", "other"}
    sizes = {n: float(p.detach().norm()) for n, p in found.items()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.AdamW(groups).step()
    assert all(float(p.detach().norm()) < sizes[n] for n, p in found.items())


def test_qk_clip_scales_mixed_heads():
    net = model()
    handle = headwise.regularize(net, InterleavedHeads(spread=0.3), QKClip(threshold=0.01))
    net(ids())
    before = net.layers[0].c_attn.weight.detach().clone()
    handle.after_step()
    ratio = (net.layers[0].c_attn.weight / before).unflatten(0, (3, 3, 8))
    assert (ratio[:2] < 0.99).all()
    # each head by one number, and values by none
    torch.testing.assert_close(ratio, ratio[:, :, :1, :1].expand_as(ratio), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ratio[2], torch.ones_like(ratio[2]))


@pytest.mark.parametrize("other", [SigmaReparam(), WeightNorm()])
def test_another_parametrization_of_the_same_weights_is_refused(other):
    with pytest.raises(ValueError, match=r"InterleavedHeads.*use one of them"):
        headwise.regularize(model(), other, InterleavedHeads())


def test_the_spread_is_checked_and_comes_from_the_methods_seed():
    with pytest.raises(ValueError, match=r"InterleavedHeads: spread must be at least 0, got -0\.1"):
        InterleavedHeads(spread=-0.1)
    nets = [model() for _ in range(3)]
    for net, seed in zip(nets, (1, 1, 2), strict=True):
        headwise.regularize(net, InterleavedHeads(spread=0.2), seed=seed)
    one, same, other = (net.layers[0].c_attn.parametrizations.weight[0].off_q for net in nets)
    assert torch.equal(one, same) and not torch.equal(one, other)
