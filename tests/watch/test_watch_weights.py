import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from grids import part_of_grid
from small_models import HOSTS, fresh
from tiny_models import FAMILIES
from torch import nn

import headwise
from headwise.health.statistics.weights import WEIGHT_STATISTICS, read_weights, weight_reading
from headwise.health.watching.weights import WEIGHT_NAMES

VECTORS = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    """Attends with separate projections and no bias, so that logits are x W_Qᵀ W_K x."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def losses(model, steps=4, watch=None, handle=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = model(VECTORS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        for one in (handle and handle.after_step, watch and watch.step):
            if one is not None:
                one()
    return found


@pytest.mark.parametrize("name", ["own", "llama"])
def test_the_figures_of_the_weights_are_those_the_audit_reads(name):
    model = fresh(HOSTS[name])
    watch = headwise.watch(model, every=1, on_alert=None, statistics=list(WEIGHT_NAMES))
    HOSTS[name].run(model)
    watch.step()
    records = watch.records()
    watch.remove()
    for site in headwise.sites(model):
        for figure, values in read_weights(weight_reading(site)).items():
            mine = [r for r in records if (r["site"], r["statistic"]) == (site.name, figure)]
            # The audit computes in fp32.
            assert [r["value"] for r in mine] == pytest.approx(values.tolist(), rel=1e-5), figure
            heads = WEIGHT_STATISTICS[figure.rpartition("_")[0]].per == "head" or len(values) == 4
            assert [r["head"] if heads else r["group"] for r in mine] == list(range(len(values)))
    assert {r["statistic"] for r in records} | set(watch.reasons()[records[0]["site"]]) == set(WEIGHT_NAMES)


def test_weights_are_read_anew_at_each_reading():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["frobenius_norm_qk"])
    model(VECTORS)
    watch.step()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight *= 2
    model(VECTORS)
    watch.step()
    values = [r["value"] for r in watch.records() if (r["site"], r["head"]) == ("blocks.0.attn", 0)]
    assert values[1] == pytest.approx(4 * values[0])


def test_reading_the_weights_of_sigma_reparam_changes_no_bit():
    found = []
    for watched in (False, True):
        model = fresh(HOSTS["own"])
        handle = headwise.regularize(model, headwise.SigmaReparam())
        watch = headwise.watch(model, every=1, on_alert=None) if watched else None
        found.append(losses(model, watch=watch, handle=handle))
    assert found[0] == found[1]
    assert any(r["statistic"] == "spectral_norm_qk" for r in watch.records())


@pytest.mark.bits
def test_reading_weights_leaves_the_vectors_of_torchs_spectral_norm_alone():
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Plain()).train()
        nn.utils.parametrizations.spectral_norm(model[0].q_proj)
        torch.manual_seed(1)
        watch = headwise.watch(model, every=1, on_alert=None) if watched else None
        found.append((losses(model, watch=watch), model[0].q_proj.parametrizations.weight[0]._u.clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert model[0].q_proj.parametrizations.weight[0].training
    assert any(r["statistic"] == "spectral_norm_qk" for r in watch.records())


def test_the_spectral_floor_is_the_theorems_and_lies_below_the_entropy():
    torch.manual_seed(0)
    model = nn.Sequential(Plain()).train()
    with torch.no_grad():
        model[0].q_proj.weight *= 0.2
    x = VECTORS * 0.3
    watch = headwise.watch(model, every=1, on_alert=None)
    model(x)
    watch.step()
    value = {(r["statistic"], r["head"]): r["value"] for r in watch.records()}
    q, k = (p.weight.detach().double().unflatten(0, (4, 8)) for p in (model[0].q_proj, model[0].k_proj))
    for head in range(4):
        product = float(torch.linalg.matrix_norm(k[head].T @ q[head], 2))
        floors = []
        for sample in x.double():
            size = 8**-0.5 * product * float(torch.linalg.matrix_norm(sample @ sample.T, 2))
            floors.append(0.0)
            for keys in range(2, 10):
                beta = math.exp(-size * math.sqrt(keys / (keys - 1)))
                whole = 1 + (keys - 1) * beta
                floors.append(math.log(whole) + size * math.sqrt(keys * (keys - 1)) * beta / whole)
        expected = sum(floors) / len(floors)
        assert expected > 0.1
        assert value["entropy_floor_spectral", head] == pytest.approx(expected, rel=1e-4)
        assert (
            value["entropy_floor_spectral", head]
            <= value["entropy_floor_centred", head]
            <= value["attention_entropy", head]
        )


@pytest.mark.parametrize(
    ("name", "reason"), [("own", "a bias is added"), ("llama", "rotary positions turn queries and keys")]
)
def test_the_spectral_floor_is_refused_where_weights_alone_do_not_make_the_logits(name, reason):
    model = fresh(HOSTS[name])
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["entropy_floor_spectral"])
    HOSTS[name].run(model)
    watch.step()
    assert not watch.records()
    for reasons in watch.reasons().values():
        assert reason in reasons["entropy_floor_spectral"]


def test_windows_are_read_and_their_tokens_are_those_of_the_whole_sample():
    family = FAMILIES["Swin"]
    model = family.build().train()
    watch = headwise.watch(model, every=1, on_alert=None)
    family.logits(model, family.batch())
    watch.step()
    assert len({r["site"] for r in watch.records()}) == family.sites[0]
    assert all(math.isfinite(r["value"]) for r in watch.records())
    assert "windows hold other tokens" in next(iter(watch.reasons().values()))["layer_redundancy"]
    share = [r["value"] for r in watch.records() if r["statistic"] == "entropy_share"]
    assert max(share) <= 1.0 + 1e-5


@pytest.mark.bits
def test_a_copy_of_a_watched_model_is_not_watched():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["max_logit"])
    twin = copy.deepcopy(model)
    twin(VECTORS * 50)
    model(VECTORS)
    watch.step()
    assert torch.equal(twin(VECTORS), model(VECTORS))
    alone = fresh(HOSTS["own"])
    other = headwise.watch(alone, every=1, on_alert=None, statistics=["max_logit"])
    alone(VECTORS)
    other.step()
    assert [r["value"] for r in watch.records()] == [r["value"] for r in other.records()]


def test_methods_may_be_removed_before_the_watch():
    model = fresh(HOSTS["own"])
    function = F.scaled_dot_product_attention
    handle = headwise.regularize(model, headwise.DropHead(p=0.2), where=["blocks.0.attn"])
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["max_logit"])
    model(VECTORS)
    handle.remove()
    watch.step()
    watch.remove()
    assert len(watch.records()) == 8
    assert F.scaled_dot_product_attention is function
    headwise.regularize(model, headwise.DropHead(p=0.2)).remove()


@pytest.mark.parametrize("inside", part_of_grid([False, True], [True]))
def test_a_model_that_was_compiled_before_is_regularized_and_watched_whichever_of_both_is_named(inside):
    # A watched model of an earlier test, collected during compilation, would restore torch's function in mid-trace.
    gc.collect()
    torch._dynamo.reset()
    model = fresh(HOSTS["own"])
    compiled = torch.compile(model, backend="eager")
    plain = compiled(VECTORS)
    handle = headwise.regularize(compiled, headwise.DropHead(p=0.9))
    assert [one.site.name for one in handle.fitted] == [one.name for one in headwise.sites(model)]
    watch = headwise.watch(model if inside else compiled, every=1, on_alert=None, statistics=["max_logit"])
    assert not torch.allclose(compiled(VECTORS), plain, atol=1e-3)
    watch.step()
    assert {r["site"] for r in watch.records()} == {one.site.name for one in handle.fitted}


def test_a_model_around_a_regularized_part_is_not_watched_in_silence():
    part = fresh(HOSTS["own"])
    headwise.regularize(part, headwise.DropHead(p=0.2))
    with pytest.raises(ValueError, match=r"0\.blocks\.0\.attn.* carry methods, but this Sequential is not the model"):
        headwise.watch(nn.Sequential(part))
    headwise.watch(part).remove()
