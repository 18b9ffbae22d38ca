"""On every family of transformers: neutral is neutral, strong acts on every layer, facts are known without a call."""

from __future__ import annotations

import copy

import pytest
import torch
from grids import part_of_grid
from rounding import assert_same_to_rounding
from tiny_models import FAMILIES, Family
from torch import Tensor, nn

import headwise
from headwise import DropColumn, DropHead, DropKey, NeuTRENO, RelaxedAttention
from headwise.attend.hosts.finding import sites
from headwise.attend.regularizing.regularize import regularize

LOADED = [(family, kind) for family in FAMILIES.values() for kind in family.implementations]
# every family in every round of tests, by the implementation that transformers chooses; both of four families
BOTH = ("Llama", "GPT2", "BERT", "T5")
KEPT = [(f, kind) for f, kind in LOADED if kind == "sdpa" or "sdpa" not in f.implementations or f.name in BOTH]
each_loaded = pytest.mark.parametrize(
    ("family", "implementation"), part_of_grid(LOADED, KEPT), ids=[f"{f.name}-{kind}" for f, kind in LOADED]
)
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def run(family: Family, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(3)
    return family.logits(model, batch)


def neutral_methods(family: Family) -> list[headwise.Method]:
    methods = [DropColumn(p=0.0), RelaxedAttention(gamma=0.0, matched_inference=True)]
    return methods if family.windowed else [*methods, NeuTRENO(strength=0.0)]


def assert_same(got: Tensor, wanted: Tensor, bits: bool) -> None:
    if bits:
        assert torch.equal(got, wanted)
    else:
        assert_same_to_rounding(got, wanted)


@pytest.mark.bits
@each_loaded
@pytest.mark.parametrize("dropout", part_of_grid([0.0, 0.1], [0.1]))
def test_neutral_methods_change_nothing(family: Family, implementation: str, dropout: float) -> None:
    model = family.build(implementation, dropout)
    for training in (False, True):
        model.train(training)
        for padding in family.paddings:
            batch = family.batch(padding)
            plain = run(family, model, batch)
            handle = regularize(model, *neutral_methods(family))
            regularized = run(family, model, batch)
            kernels = {row.kernels for row in handle.report().rows}
            # The same kernel gives the same bits; a model loaded as eager keeps its own only where nothing acts.
            assert_same(regularized, plain, bits=implementation == "sdpa" and kernels <= {("fused",)})
            handle.remove()
            assert torch.equal(run(family, model, batch), plain)


@each_family
def test_neutral_methods_change_no_gradient(family: Family) -> None:
    model = family.build().train()
    batch = family.batch(family.paddings[-1])
    weight = torch.randn(run(family, model, batch).shape)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        (run(family, model, batch) * weight).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    regularize(model, *neutral_methods(family))
    regularized = gradients()
    assert regularized.keys() == plain.keys()
    for name, grad in plain.items():
        assert (regularized[name] - grad).norm() <= 2e-5 * grad.norm() + 1e-5, name


@each_family
def test_strong_methods_act_on_every_layer(family: Family) -> None:
    model = family.build().train()
    batch = family.batch(family.paddings[-1])
    plain = run(family, model, batch)
    for name in [site.name for site in sites(model)]:
        for method in (DropColumn(p=0.7), RelaxedAttention(gamma=0.9), DropHead(p=0.7)):
            handle = regularize(model, method, where=[name])
            assert (run(family, model, batch) - plain).abs().max() > 1e-2, f"{method!r} does nothing on {name}"
            handle.remove()


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if not f.windowed], ids=lambda f: f.name)
def test_carried_values_act_on_every_layer_but_each_stacks_first(family: Family) -> None:
    model = family.build()
    batch = family.batch()
    plain = run(family, model, batch)
    for site in [site for site in sites(model) if not site.is_cross]:
        if site.depth == 0:
            with pytest.raises(ValueError, match="changes nothing on the first self attention"):
                regularize(model, NeuTRENO(strength=0.9), where=[site.name])
            continue
        handle = regularize(model, NeuTRENO(strength=0.9), where=[site.name])
        assert (run(family, model, batch) - plain).abs().max() > 1e-2, site.name
        first = next(s.name for s in sites(model) if s.stack == site.stack)
        assert handle.report().status(first) == "read"
        handle.remove()


@each_family
def test_facts_are_known_without_a_call(family: Family) -> None:
    model = family.build()
    found = sites(model)
    first = found[0]
    assert {name: getattr(first, name) for name in family.facts} == family.facts
    assert (len(found), sum(site.is_cross for site in found)) == family.sites
    assert all(site.windowed == family.windowed for site in found)
    assert [site.causal for site in found] == [family.is_causal(site.stack, site.is_cross) for site in found]
    assert {(s.depth, s.layers) for s in found if s.stack == first.stack and not s.is_cross} == {
        (i, first.layers) for i in range(first.layers)
    }


@each_family
def test_facts_agree_with_what_a_call_shows(family: Family) -> None:
    facts = ("heads", "kv_heads", "head_dim", "hidden")
    model = family.build()
    told = {site.name: tuple(getattr(site, name) for name in facts) for site in sites(model)}
    handle = regularize(model, DropColumn(), example=family.batch(family.paddings[-1]))
    assert {f.site.name: tuple(getattr(f.site, name) for name in facts) for f in handle.fitted} == told


@each_family
def test_the_report_lists_every_attention_layer_once(family: Family) -> None:
    model = family.build()
    handle = regularize(model, DropColumn())
    rows = handle.report().rows
    assert [row.name for row in rows] == [site.name for site in sites(model)]
    assert len({row.name for row in rows}) == len(rows) == family.sites[0]
    assert {row.status for row in rows} == {"regularized"}


def sees_the_future(family: Family, model: nn.Module) -> bool:
    batch = family.batch()
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    changed = batch[name].clone()
    changed[:, -1] = (changed[:, -1] + 1).clamp(min=3) % 60
    before, after = (run(family, model, {**batch, name: ids}) for ids in (batch[name], changed))
    assert (before - after)[:, -1].abs().max() > 1e-3
    return bool((before - after)[:, :-1].abs().max() > 1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES.values() if f.kind in ("decoder", "encoder-decoder", "speech")], ids=lambda f: f.name
)
def test_causality_holds_without_a_mask(family: Family, implementation: str) -> None:
    if implementation not in family.implementations:
        return
    model = family.build(implementation).train()
    regularize(model, RelaxedAttention(gamma=0.5), NeuTRENO(strength=0.5))
    assert not sees_the_future(family, model)


def with_junk(batch: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    changed = dict(batch)
    for name in [n for n in batch if n.endswith("input_ids")]:
        mask = batch.get(name.replace("input_ids", "attention_mask"))
        if mask is not None:
            changed[name] = torch.where(mask.bool(), batch[name], token)
    return changed


@each_loaded
def test_padding_is_kept_out_at_strong_settings(family: Family, implementation: str) -> None:
    model = family.build(implementation).train()
    for padding in family.paddings:
        batch = family.batch(padding)
        real = family.real(batch)
        if real is None:
            continue
        handle = regularize(model, RelaxedAttention(gamma=0.9), NeuTRENO(strength=0.5))
        before, after = (run(family, model, with_junk(batch, token)) for token in (7, 9))
        rows = real.bool() if before.dim() == 3 else slice(0, 0)
        assert (before - after)[rows].abs().sum() <= 1e-4, padding
        handle.remove()


@each_loaded
def test_queries_without_keys_stay_finite(family: Family, implementation: str) -> None:
    model = family.build(implementation).train()
    methods = [DropKey(p=0.7, unit="element"), DropHead(p=0.7), RelaxedAttention(gamma=0.3)]
    handle = regularize(model, *methods)
    out = family.logits(model, family.batch("left" if "left" in family.paddings else family.paddings[-1]))
    (out.square().mean() + handle.loss()).backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["BART", "T5", "Whisper"])
def test_encoder_and_decoder_each_carry_their_own_first_values(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    handle = regularize(model, NeuTRENO(strength=0.9))
    report = handle.report()
    firsts = [s.name for s in sites(model) if not s.is_cross and s.depth == 0]
    assert len(firsts) == 2
    assert [f.site.name for f in handle.fitted if f.shares_values] == firsts
    assert all(report.status(s.name) == "not applicable" for s in sites(model) if s.is_cross)


@pytest.mark.bits
def test_a_deep_copy_acts_by_itself() -> None:
    family = FAMILIES["Llama"]
    model = family.build().train()
    batch = family.batch("left")
    plain = run(family, model, batch)
    handle = regularize(model, RelaxedAttention(gamma=0.9))
    twin = copy.deepcopy(model)
    assert torch.equal(run(family, twin, batch), run(family, model, batch))
    handle.remove()
    assert torch.equal(run(family, model, batch), plain)
    assert not torch.equal(run(family, twin, batch), plain)
    headwise.handle(twin).remove()
    assert torch.equal(run(family, twin, batch), plain)
