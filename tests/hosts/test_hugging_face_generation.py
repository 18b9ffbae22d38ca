"""Generation with growing, static and sliding caches gives what whole forwards give, with methods acting."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, Family
from torch import Tensor, nn

import headwise
from headwise import XSA, AttnScale, NeuTRENO, RelaxedAttention, ValueResidual
from headwise.attend.regularizing.regularize import regularize

GENERATES = [f for f in FAMILIES.values() if f.kind in ("decoder", "encoder-decoder")]
LOADED = [(family, kind) for family in GENERATES for kind in family.implementations]
each_loaded = pytest.mark.parametrize(
    ("family", "implementation"), LOADED, ids=[f"{f.name}-{kind}" for f, kind in LOADED]
)
NEW = 7


def generate(model: nn.Module, family: Family, padding: str = "left", **settings) -> tuple[Tensor, Tensor]:
    """Return the ids and the logits of greedy generation."""
    batch = {name: x for name, x in family.batch(padding).items() if not name.startswith("decoder")}
    # Padding and end are never chosen, so that all rows go on.
    chosen = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    out = model.generate(**batch, **chosen, **settings)
    return out.sequences, torch.stack(out.logits)


def assert_same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], wanted[0])
    assert (got[1] - wanted[1]).abs().max() <= 2e-5


@each_loaded
def test_neutral_methods_generate_as_the_plain_model(family: Family, implementation: str) -> None:
    model = family.build(implementation)
    plain = generate(model, family)
    regularize(model, RelaxedAttention(gamma=0.0, matched_inference=True), NeuTRENO(strength=0.0), AttnScale())
    assert_same(generate(model, family), plain)


@each_loaded
def test_a_growing_cache_gives_what_whole_forwards_give(family: Family, implementation: str) -> None:
    model = family.build(implementation)
    plain = generate(model, family)
    regularize(model, NeuTRENO(strength=0.6), RelaxedAttention(gamma=0.4, matched_inference=True))
    cached = generate(model, family)
    assert (cached[1][0] - plain[1][0]).abs().max() > 1e-2
    assert_same(cached, generate(model, family, use_cache=False))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "T5"])
@pytest.mark.parametrize(
    "method",
    [NeuTRENO(strength=0.6), XSA(), RelaxedAttention(gamma=0.4, matched_inference=True)],
    ids=lambda m: type(m).__name__,
)
def test_a_static_cache_gives_what_a_growing_one_gives(name: str, method: headwise.Method) -> None:
    family = FAMILIES[name]
    model = family.build()
    regularize(model, method)
    for padding in ("none", "left"):
        static = generate(model, family, padding, cache_implementation="static")
        assert_same(static, generate(model, family, padding))


def test_a_static_sliding_cache_may_be_filled_in_pieces() -> None:
    from transformers import StaticCache

    family = FAMILIES["Mistral"]
    model = family.build()
    regularize(model, NeuTRENO(strength=0.6))
    ids = family.batch()["input_ids"]
    whole = model(input_ids=ids).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    # Three tokens, three that go beyond the window of four, and one by one.
    pieces = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([3, 3, 1, 1, 1, 1], dim=1)]
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= 2e-5


def test_a_mix_of_values_generates_with_a_cache() -> None:
    family = FAMILIES["Llama"]
    model = family.build()
    regularize(model, ValueResidual(mix=0.5))
    assert_same(generate(model, family), generate(model, family, use_cache=False))


def test_a_mix_of_values_refuses_sliding_caches_of_different_lengths_by_name() -> None:
    family = FAMILIES["Gemma2"]
    model = family.build()
    regularize(model, ValueResidual(mix=0.5))
    with pytest.raises(RuntimeError, match=r"ValueResidual mixes values token by token.*use_cache=False"):
        generate(model, family)
    assert generate(model, family, use_cache=False)[0].shape[1] > NEW


@pytest.mark.bits
def test_beams_keep_their_own_carried_values() -> None:
    family = FAMILIES["BART"]
    model = family.build()
    regularize(model, NeuTRENO(strength=0.6))
    assert torch.equal(
        generate(model, family, num_beams=3)[0], generate(model, family, num_beams=3, use_cache=False)[0]
    )


def test_carried_values_refuse_keys_that_are_not_the_layers_own_tokens() -> None:
    from transformers import SegformerConfig, SegformerModel

    sizes = {"hidden_sizes": [16, 32], "num_encoder_blocks": 2, "depths": [2, 2], "num_attention_heads": [2, 4]}
    more = {
        "sr_ratios": [2, 1],
        "strides": [2, 2],
        "patch_sizes": [3, 3],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
    }
    config = SegformerConfig(**sizes, **more)
    config._attn_implementation = "sdpa"
    model = SegformerModel(config).eval()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    regularize(model, RelaxedAttention(gamma=0.5, matched_inference=True)).remove()
    regularize(model, NeuTRENO(strength=0.6))
    with pytest.raises(RuntimeError, match=r"attends from 64 tokens to 16 keys that are not these tokens.*where="):
        model(pixel_values=pixels)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("method", [XSA(), NeuTRENO(strength=0.6), ValueResidual(mix=0.5)], ids=repr)
def test_layers_that_take_over_the_keys_of_earlier_ones_know_their_own_tokens(method, static) -> None:
    from transformers import DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig, StaticCache

    torch.manual_seed(0)
    # Values are mixed token by token, which windows of other lengths than the first layer's do not allow.
    sliding = "full_attention" if isinstance(method, ValueResidual) else "sliding_attention"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    sizes |= {"vocab_size": 50, "vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [sliding, "full_attention"] * 2}
    more = {"altup_num_inputs": 2, "sliding_window": 4, "activation_sparsity_pattern": [0.0] * 4, "pad_token_id": 0}
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**sizes, **layers, **more)).eval()
    ids = torch.arange(1, 19).view(2, 9)
    plain = model(input_ids=ids, use_cache=False).logits
    regularize(model, method)
    whole = model(input_ids=ids, use_cache=False).logits
    assert (whole - plain).abs().max() > 1e-3
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    pieces = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([6, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=2e-5)
