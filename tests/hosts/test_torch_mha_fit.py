"""nn.MultiheadAttention: how headwise stands in its place, what it refuses, and the way back."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from mha_cases import B, C, H, Pair, T, case, same
from torch import Tensor, nn
from torch.nn.utils import parametrize

import headwise
from headwise import DropHead, GatedOutput, NeuTRENO, RelaxedAttention, SigmaReparam


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
    handle = headwise.regularize(it.module, GatedOutput(), SigmaReparam(), RelaxedAttention(gamma=0.5))
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
    with pytest.raises(
        ValueError, match=r"Own overrides nn.MultiheadAttention.forward.*let it hold an nn.MultiheadAttention"
    ):
        headwise.regularize(nn.Sequential(Own(C, H)), DropHead())
    patched = nn.MultiheadAttention(C, H)
    patched.forward = patched.forward
    with pytest.raises(
        ValueError, match=r"its forward was replaced on the module itself by MultiheadAttention.forward: undo that"
    ):
        headwise.regularize(nn.ModuleList([patched]), DropHead())


def test_wrong_arguments_get_the_hosts_own_error():
    it = case()
    x = it.inputs[0]
    headwise.regularize(nn.ModuleList([it.module]), DropHead())
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
    with pytest.raises(RuntimeError, match=r"got nested tensors. .*Pass padded tensors and key_padding_mask= instead"):
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
