"""nn.MultiheadAttention alone: every way to call it, with nothing acting, at neutral settings and with methods that act."""

from __future__ import annotations

import copy
import io
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import headwise
from headwise import AttnScale, DropHead, EntropyPenalty, GatedOutput, InputNoise, NeuTRENO, RelaxedAttention, SigmaReparam

C, H, B, T, N = 16, 4, 3, 5, 7
KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 12, "vdim": 8},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "both extras": {"add_bias_kv": True, "add_zero_attn": True},
}
LAYOUTS = ("batch first", "tokens first", "unbatched")
SOURCES = ("self", "keys apart", "values apart")
MASKS = ("none", "bool", "float", "bool heads", "float heads", "causal hint")
PADDINGS = ("none", "bool", "float")


@dataclass
class Case:
    """One module and one call of it."""

    module: nn.MultiheadAttention
    inputs: tuple[Tensor, Tensor, Tensor]
    settings: dict[str, Any]

    def __call__(self, seed: int = 1, **more: Any) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(seed)
        return self.module(*self.inputs, **{**self.settings, **more})


def case(kind: str = "packed", layout: str = "batch first", source: str = "self", mask="none", padding="none", dropout=0.0) -> Case:
    """Make a module with weights far from 0 and the arguments of one call."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(C, H, dropout=dropout, batch_first=layout == "batch first", **KINDS[kind])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    one, apart = layout == "unbatched", source == "keys apart"
    batch, keys = 1 if one else B, N if apart else T

    def tokens(count: int, size: int) -> Tensor:
        x = torch.randn(B, count, size)
        return x[0] if one else x if layout == "batch first" else x.transpose(0, 1).contiguous()

    q = tokens(T, C)
    k = q if source == "self" else tokens(keys, module.kdim)
    v = k if source != "values apart" and module.kdim == module.vdim else tokens(keys, module.vdim)
    settings: dict[str, Any] = {"need_weights": False}
    if mask == "causal hint":
        settings.update(attn_mask=torch.ones(T, keys, dtype=torch.bool).triu(1), is_causal=True)
    elif mask != "none":
        shape = (batch * H, T, keys) if "heads" in mask else (T, keys)
        settings["attn_mask"] = torch.randn(shape) if "float" in mask else (torch.rand(shape) < 0.3).index_fill(-1, torch.tensor(0), False)
    if padding != "none":
        missing = torch.arange(keys) >= torch.tensor([keys, 3, keys - 1][:batch])[:, None]
        missing = missing if padding == "bool" else torch.zeros(missing.shape).masked_fill(missing, -1e9)
        settings["key_padding_mask"] = missing[0] if one else missing
    return Case(module, (q, k, v), settings)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two results are the same bits in the same layout."""
    return a is b if a is None or b is None else torch.equal(a, b) and a.stride() == b.stride()


def close(a: Tensor, b: Tensor) -> bool:
    """Tell whether two results agree to 1e-6 of fp32."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-6)


def calls(kind: str):
    """Walk the ways to call a kind of module."""
    for layout, source, mask, padding in itertools.product(LAYOUTS, SOURCES, MASKS, PADDINGS):
        mixed = {mask.split()[0], padding} == {"bool", "float"} or (mask == "causal hint" and padding == "float")
        if not mixed and (kind != "kdim" or source == "keys apart"):
            yield layout, source, mask, padding


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
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
    assert close(it()[0], 2 * moved)
    assert shapes == [(1 if layout == "unbatched" else B, T, C)] * 2


@pytest.mark.parametrize("method", [InputNoise(scale=1.0, unit="std"), InputNoise(scale=1.0, unit="std", per_head=True), GatedOutput()])
def test_methods_that_read_what_enters_the_layer_act_in_every_layout(method):
    for layout in LAYOUTS:
        it = case(layout=layout)
        plain = it()[0]
        headwise.regularize(it.module, method)
        acted = it()[0]
        assert acted.shape == plain.shape
        assert (acted - plain).abs().max() > 1e-3


class Pair(nn.Module):
    """Two attention layers, the second of which can carry values of the first."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.MultiheadAttention(C, H, batch_first=True, **settings) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, **settings: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        y = self.layers[0](x, x, x, **settings)[0]
        return y, *self.layers[1](y, y, y, **settings)


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
    values = [nn.functional.linear(t, m.in_proj_weight[2 * C :], m.in_proj_bias[2 * C :]) for t, m in zip((x, first), model.layers)]
    expected = plain + nn.functional.linear(0.5 * (values[0] - values[1]), model.layers[1].out_proj.weight)
    assert close(again, first)
    assert (carried - expected).abs().max() < 1e-5
    assert weights is None or close(same_weights, weights)


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


def test_parametrized_projections_are_read_at_each_call_and_fold_bit_for_bit():
    it = case()
    plain = it()[0]
    headwise_handle = headwise.regularize(it.module, DropHead(p=0.0))
    parametrize.register_parametrization(it.module, "in_proj_weight", Doubled())
    assert (it()[0] - plain).abs().max() > 1e-2
    parametrize.remove_parametrizations(it.module, "in_proj_weight", leave_parametrized=False)
    assert same(it()[0], plain)
    headwise_handle.remove()
    handle = headwise.regularize(it.module, SigmaReparam(init="one"), DropHead(p=0.5))
    it.module.eval()
    with torch.no_grad():
        shown = it()[0]
        handle.fold()
        assert same(it()[0], shown)
    assert type(it.module) is nn.MultiheadAttention
    assert (shown - plain).abs().max() > 1e-2


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_an_observer_in_evaluation_sees_the_call_and_changes_no_bit():
    it = case(padding="bool")
    it.module.eval()
    seen = []
    with torch.no_grad():
        plain = it()[0]
        fitted = headwise.regularize(it.module, DropHead()).fitted[0]
        fitted.armed, fitted.observer = True, lambda call, out: seen.append(tuple(out.shape))
        assert same(it()[0], plain)
    assert seen == [(B, H, T, C // H)]


def test_removal_gives_back_bits_keys_class_and_attributes():
    it = case(dropout=0.1)
    plain, keys, names = it()[0], list(it.module.state_dict()), list(it.module.__dict__)
    handle = headwise.regularize(it.module, GatedOutput(), NeuTRENO(), RelaxedAttention(gamma=0.5))
    it()
    handle.remove()
    assert same(it()[0], plain)
    assert list(it.module.state_dict()) == keys
    assert list(it.module.__dict__) == names
    assert type(it.module) is nn.MultiheadAttention


def test_copies_stand_on_their_own():
    model, x = Pair().train(), torch.randn(B, T, C)
    plain = model(x)[1]
    handle = headwise.regularize(model, NeuTRENO(), DropHead(p=0.5))
    twin = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    regularized = model(x)[1]
    assert same(twin(x)[1], regularized)
    assert same(loaded(x)[1], regularized)
    headwise.handle(twin).remove()
    assert same(twin(x)[1], plain)
    assert not same(model(x)[1], plain)
    handle.remove()
    assert same(model(x)[1], plain)


def test_a_wrapper_put_around_the_fitted_forward_survives_removal():
    it = case()
    plain, handle = it()[0], headwise.regularize(it.module, DropHead(p=0.7))
    inner = it.module.forward
    it.module.forward = lambda *args, **settings: inner(*args, **settings)
    handle.remove()
    assert same(it()[0], plain)


class Own(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


def test_what_cannot_be_reached_is_named_with_its_remedy():
    with pytest.raises(ValueError, match=r"Own overrides nn.MultiheadAttention.forward.*let it hold an nn.MultiheadAttention"):
        headwise.regularize(nn.Sequential(Own(C, H)), DropHead())
    patched = nn.MultiheadAttention(C, H)
    patched.forward = patched.forward
    with pytest.raises(ValueError, match=r"its forward was replaced on the module itself by .*take that off"):
        headwise.regularize(nn.ModuleList([patched]), DropHead())


def test_wrong_arguments_get_the_hosts_own_error():
    it = case()
    x = it.inputs[0]
    headwise.regularize(it.module, DropHead())
    for inputs, settings, error, text in (
        ((x, x, x[:, :3]), {}, AssertionError, "does not match value shape"),
        ((x, x, x), {"is_causal": True}, RuntimeError, "Need attn_mask"),
        ((x, x, x), {"attn_mask": torch.zeros(2, 2)}, RuntimeError, "shape of the 2D attn_mask"),
        ((x, x, x), {"key_padding_mask": torch.zeros(B, T + 1)}, AssertionError, "key_padded_mask.shape"),
        ((x, x, x), {"attn_mask": torch.zeros(T, T, dtype=torch.long)}, AssertionError, "only bool and floating types"),
        ((x[..., :8],) * 3, {}, AssertionError, "was expecting embedding dimension"),
    ):
        with pytest.raises(error, match=text):
            it.module(*inputs, **settings)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]])
    with pytest.raises(RuntimeError, match="got nested tensors; .*Pass padded tensors and key_padding_mask= instead"):
        it.module(nested, nested, nested, need_weights=False)


def test_what_a_site_is_known_as():
    model = nn.ModuleDict({
        "self_attn": nn.MultiheadAttention(C, H), "cross_attn": nn.MultiheadAttention(C, H),
        "apart": nn.MultiheadAttention(C, H, kdim=8), "multihead_attn": nn.MultiheadAttention(C, H),
    })  # fmt: skip
    facts = {s.name: (s.heads, s.kv_heads, s.head_dim, s.hidden, s.host, s.is_cross) for s in headwise.sites(model)}
    assert facts["self_attn"] == (H, H, C // H, C, "torch", False)
    assert [name for name in facts if facts[name][-1]] == ["cross_attn", "apart", "multihead_attn"]
    alone = headwise.sites(nn.Sequential(nn.ModuleDict({"multihead_attn": nn.MultiheadAttention(C, H)})))
    assert not alone[0].is_cross
    headwise.regularize(model, DropHead())
    assert len(headwise.sites(model)) == 4
