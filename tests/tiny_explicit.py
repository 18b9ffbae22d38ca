"""Tiny models of families that compute their own attention, for tests of the errors that name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_models import PICTURE, SIZES, TEXT, VOCABULARY
from torch import nn


def plain_model(model: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a maker of a model of this class, loaded as eager, with its own random weights."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, model.removesuffix("Model") + "Config")(**settings)
        config._attn_implementation = "eager"
        return getattr(transformers, model)(config).eval()

    return make


# Families that compute their own attention, and the names of the modules that do.
UNREACHABLE: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "DeBERTa": (
        plain_model("DebertaModel", **TEXT, **{**SIZES, "num_hidden_layers": 2}),
        ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self"),
    ),
    "Longformer": (
        plain_model("LongformerModel", **TEXT, **{**SIZES, "num_hidden_layers": 2}, attention_window=[4, 4]),
        ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self"),
    ),
    "BLOOM": (
        plain_model("BloomModel", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        ("h.0.self_attention", "h.1.self_attention"),
    ),
    "GPT-J": (plain_model("GPTJModel", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    ("h.0.attn", "h.1.attn")),
    "XLNet": (
        plain_model("XLNetModel", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48),
        ("layer.0.rel_attn", "layer.1.rel_attn"),
    ),
    "MPT": (plain_model("MptModel", vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4), ("blocks.0.attn",
    "blocks.1.attn")),
    "SwinV2": (
        plain_model("Swinv2Model", **PICTURE, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2),
        ("encoder.layers.0.blocks.0.attention.self", "encoder.layers.1.blocks.0.attention.self"),
    ),
}  # fmt: skip
