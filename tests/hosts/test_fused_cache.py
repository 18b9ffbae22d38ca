"""Caches on layers that call fused attention themselves: carried values meet the tokens they belong to, in a static
cache too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headwise
from headwise import XSA, NeuTRENO, RelaxedAttention, ValueResidual

OWN_VALUES = [NeuTRENO(strength=0.6), ValueResidual(mix=0.5), XSA()]


def falcon() -> nn.Module:
    torch.manual_seed(0)
    config = tf.FalconConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = tf.FalconForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model


def generated(model: nn.Module, mask: Tensor, **settings) -> Tensor:
    ids = torch.randint(4, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    return torch.stack(out.logits)


PADDINGS = {"none": torch.ones(2, 7, dtype=torch.long), "left": torch.tensor([[1] * 7, [0] * 3 + [1] * 4])}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("method", OWN_VALUES, ids=lambda m: type(m).__name__)
def test_falcon_generates_with_a_static_cache_as_without_one(method, padding):
    model, mask = falcon(), PADDINGS[padding]
    plain = generated(model, mask, use_cache=False)
    headwise.regularize(model, method)
    whole = generated(model, mask, use_cache=False)
    assert (whole - plain).abs().max() > 1e-2
    for settings in ({}, {"cache_implementation": "static"}):
        assert (generated(model, mask, **settings) - whole).abs().max() < 1e-4


class Cached(nn.Module):
    """Attention of one's own with a cache of a fixed length, as small decoders write it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.kept is None:
            order = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=order).transpose(1, 2).flatten(2))
        places = start[:, None] + torch.arange(x.shape[1])
        for kept, new in zip(self.kept, (k, v), strict=True):
            kept.scatter_(2, places[:, None, :, None].expand_as(new), new)
        mask = (torch.arange(self.kept[0].shape[2]) <= places[..., None])[:, None]
        return self.proj(F.scaled_dot_product_attention(q, *self.kept, attn_mask=mask).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, start)
        return x

    def cache(self, batch: int, length: int) -> None:
        for layer in self.layers:
            layer.kept = torch.randn(batch, 4, length, 8), torch.randn(batch, 4, length, 8)


@pytest.mark.parametrize("method", OWN_VALUES, ids=lambda m: type(m).__name__)
def test_a_cache_of_ones_own_may_be_filled_in_pieces_and_by_samples_of_other_lengths(method):
    model = Decoder().eval()
    headwise.regularize(model, method)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(2))
    whole = model(x)
    model.cache(2, 12)
    parts, start = [], torch.zeros(2, dtype=torch.long)
    for part in x.split([4, 3, 1, 1], dim=1):
        parts.append(model(part, start))
        start = start + part.shape[1]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5
    # Sample 0 has three tokens in its cache, sample 1 five: both get their own next two.
    model.cache(2, 12)
    model(x[:, :5], torch.zeros(2, dtype=torch.long))
    starts = torch.tensor([3, 5])
    got = model(torch.stack([x[0, 3:5], x[1, 5:7]]), starts)
    assert (got - torch.stack([whole[0, 3:5], whole[1, 5:7]])).abs().max() < 1e-5


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_that_goes_past_fused_attention_is_refused_by_name(training):
    model = falcon().train(training)
    ids = torch.randint(4, 60, (2, 7))
    plain = model(input_ids=ids, output_attentions=True)
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.5, matched_inference=True))
    with pytest.raises(
        RuntimeError, match=r"h\.0\.self_attention computed.*without.*RelaxedAttention.*output_attentions"
    ):
        model(input_ids=ids, output_attentions=True)
    model(input_ids=ids)
    handle.remove()
    again = model(input_ids=ids, output_attentions=True)
    assert torch.equal(again.logits, plain.logits) or training


def test_where_no_method_acts_in_evaluation_the_models_own_weights_are_given():
    model = falcon()
    ids = torch.randint(4, 60, (2, 7))
    plain = model(input_ids=ids, output_attentions=True)
    headwise.regularize(model, RelaxedAttention(gamma=0.5))
    again = model(input_ids=ids, output_attentions=True)
    assert torch.equal(again.attentions[0], plain.attentions[0])
