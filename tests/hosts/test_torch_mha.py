"""nn.MultiheadAttention: every way to call it, with nothing acting, at neutral settings and with methods that act."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from grids import part_of_grid
from mha_cases import KINDS, LAYOUTS, SOURCES, B, C, H, Pair, T, calls, case, close, same
from torch import Tensor, nn

import headwise
from headwise import LSA, XSA, AttnScale, DropHead, EntropyPenalty, GatedOutput, InputNoise, NeuTRENO, RelaxedAttention

# each kind is called in some two hundred ways
SOME = ("packed", "kdim", "both extras")


@pytest.mark.bits
@pytest.mark.parametrize("kind", part_of_grid(KINDS, SOME))
def test_at_neutral_settings_training_keeps_every_bit_and_every_random_number(kind):
    for way in calls(kind):
        it = case(kind, *way, dropout=0.1)
        plain, state = it(), torch.get_rng_state()
        with_weights = it(need_weights=True, average_attn_weights=False)
        handle = headwise.regularize(it.module, DropHead(p=0.0))
        assert same(it()[0], plain[0]), way
        assert torch.equal(torch.get_rng_state(), state), way
        neutral = it(need_weights=True, average_attn_weights=False)
        assert close(neutral[0], with_weights[0]), way
        assert close(neutral[1], with_weights[1]), way
        handle.remove()


@pytest.mark.bits
@pytest.mark.parametrize("kind", part_of_grid(KINDS, SOME))
def test_where_no_method_acts_outputs_weights_and_gradients_are_the_hosts_bits(kind):
    for (*way, padding), need, average in itertools.product(calls(kind), (False, True), (False, True)):
        if average and not need:
            continue
        it = case(kind, *way, padding, dropout=0.1)
        results = []
        for fit in (False, True):
            handle = headwise.regularize(it.module, allow_none=True) if fit else None
            out, weights = it(need_weights=need, average_attn_weights=average)
            results.append((out, weights, *torch.autograd.grad(out.square().sum(), list(it.module.parameters()))))
        assert all(same(a, b) for a, b in zip(*results, strict=True)), (way, padding, need, average)
        assert handle is not None
        handle.remove()


@pytest.mark.bits
def test_a_method_that_acts_in_training_alone_leaves_evaluation_to_the_native_path():
    for layout, need in itertools.product(LAYOUTS, (False, True)):
        it = case(layout=layout, padding="bool")
        it.module.eval()
        with torch.no_grad():
            plain = it(need_weights=need)
            headwise.regularize(it.module, DropHead(p=0.7))
            assert all(same(a, b) for a, b in zip(it(need_weights=need), plain, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_that_acts_in_evaluation_acts_on_the_native_path_too(kind):
    for layout in LAYOUTS:
        it = case(kind, layout, "keys apart", padding="bool")
        it.module.eval()
        with torch.no_grad():
            plain = it()[0]
            handle = headwise.regularize(it.module, RelaxedAttention(gamma=0.9, matched_inference=True))
            relaxed = it()[0]
            handle.remove()
            handle = headwise.regularize(it.module, AttnScale())
            assert close(it()[0], plain)
        assert (relaxed - plain).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["packed", "kdim", "both extras"])
def test_the_weights_given_back_are_those_that_a_method_left(kind):
    for layout in LAYOUTS:
        it = case(kind, layout, "keys apart")
        plain = it(need_weights=True, average_attn_weights=False)[1]
        headwise.regularize(it.module, RelaxedAttention(gamma=0.4))
        mixed = it(need_weights=True, average_attn_weights=False)[1]
        assert close(mixed, 0.6 * plain + 0.4 / plain.shape[-1])
        assert close(it(need_weights=True)[1], mixed.mean(-3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_stages_see_samples_first_and_an_edit_reaches_what_is_the_same_tensor(layout, source, monkeypatch):
    it = case(layout=layout, source=source)
    fitted = headwise.regularize(it.module, DropHead(p=0.0)).fitted[0]
    q, k, v = it.inputs
    plain = type(it.module).forward
    moved = plain(it.module, q + 1, k + 1 if k is q else k, v + 1 if v is q else v)[0]
    shapes = []

    def enter(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x + 1

    def leave(y: Tensor) -> Tensor:
        shapes.append(tuple(y.shape))
        return 2 * y

    monkeypatch.setattr(fitted, "enter", enter)
    monkeypatch.setattr(fitted, "leave", leave)
    assert torch.allclose(it()[0], 2 * moved, atol=1e-5)
    assert shapes == [(1 if layout == "unbatched" else B, T, C)] * 2


@pytest.mark.parametrize(
    "method", [InputNoise(scale=1.0, unit="std"), InputNoise(scale=1.0, unit="std", per_head=True), GatedOutput()]
)
def test_methods_that_read_what_enters_the_layer_act_in_every_layout(method):
    for layout in LAYOUTS:
        it = case(layout=layout)
        plain = it()[0]
        headwise.regularize(it.module, method)
        acted = it()[0]
        assert acted.shape == plain.shape
        assert (acted - plain).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["packed", "bias_kv", "zero", "both extras"])
@pytest.mark.parametrize("mask", ["none", "causal", "hint", "padding"])
def test_values_carried_between_layers_are_those_of_the_tokens_and_not_of_extra_keys(kind, mask):
    model, x = Pair(**KINDS[kind]), torch.randn(B, T, C)
    order = torch.ones(T, T, dtype=torch.bool).triu(1)
    settings: dict[str, Any] = {
        "none": {},
        "causal": {"attn_mask": order},
        "hint": {"attn_mask": order, "is_causal": True, "need_weights": False},
        "padding": {"key_padding_mask": (torch.arange(T) >= torch.tensor([5, 3, 4])[:, None])},
    }[mask]
    first, plain, weights = model(x, **settings)
    headwise.regularize(model, NeuTRENO(strength=0.5))
    again, carried, same_weights = model(x, **settings)
    values = [
        nn.functional.linear(t, m.in_proj_weight[2 * C :], m.in_proj_bias[2 * C :])
        for t, m in zip((x, first), model.layers)
    ]
    expected = plain + nn.functional.linear(0.5 * (values[0] - values[1]), model.layers[1].out_proj.weight)
    assert close(again, first)
    assert (carried - expected).abs().max() < 1e-5
    assert weights is None or close(same_weights, weights)


@pytest.mark.parametrize("kind", ["packed", "bias_kv", "zero", "both extras"])
@pytest.mark.parametrize("method", [XSA(), LSA()], ids=lambda m: type(m).__name__)
def test_a_tokens_own_key_and_value_are_told_from_extra_keys(kind, method):
    module, x = case(kind).module, torch.randn(B, T, C)
    nn.init.eye_(module.out_proj.weight)
    nn.init.zeros_(module.out_proj.bias)
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    if module.bias_k is not None:
        k, v = (torch.cat([y, one.expand(B, 1, C)], 1) for y, one in ((k, module.bias_k), (v, module.bias_v)))
    if module.add_zero_attn:
        k, v = (nn.functional.pad(y, (0, 0, 0, 1)) for y in (k, v))
    q, k, v = (y.unflatten(-1, (H, C // H)).transpose(1, 2) for y in (q, k, v))
    s = q @ k.mT / (C // H) ** 0.5
    if type(method) is LSA:
        wanted = s.masked_fill(torch.eye(T, k.shape[2], dtype=torch.bool), float("-inf")).softmax(-1) @ v
    else:
        o, own = s.softmax(-1) @ v, nn.functional.normalize(v[:, :, :T], dim=-1)
        wanted = o - (o * own).sum(-1, keepdim=True) * own
    headwise.regularize(module, method)
    out = module(x, x, x, need_weights=False)[0]
    assert (out - wanted.transpose(1, 2).flatten(2)).abs().max() < 1e-5


def test_penalties_average_over_real_queries_in_every_layout():
    found = []
    for layout, extended in itertools.product(("batch first", "tokens first"), (False, True)):
        it = case(layout=layout, padding="bool")
        if extended:
            junk = torch.full_like(it.inputs[0], 9.0)
            axis = 1 if layout == "batch first" else 0
            x = torch.cat([it.inputs[0], junk], dim=axis)
            it.inputs = (x, x, x)
            it.settings["key_padding_mask"] = nn.functional.pad(it.settings["key_padding_mask"], (0, T), value=True)
        handle = headwise.regularize(it.module, EntropyPenalty(strength=1.0))
        it()
        found.append(float(handle.loss().detach()))
    assert found[0] < 0
    assert found == pytest.approx([found[0], found[0], found[2], found[2]], rel=1e-5)
