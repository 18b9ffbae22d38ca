"""Tiny randomly initialised transformers of all supported Hugging Face families, with matching batches.

`FAMILIES["Llama"].build(implementation="sdpa", dropout=0.1)` returns a model in eval mode, `.batch("left")` its input.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, BATCH = 61, 10, 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURE = {"image_size": 16, "patch_size": 4, "num_channels": 3}


@dataclass(frozen=True)
class Family:
    """Model family: how to build it, its batches, and its expected sites.

    Attributes:
        make: a function from the dropout to the model's class and config.
        kind: "decoder", "encoder", "encoder-decoder", "vision", "vision-text" or "speech".
        facts: the expected properties of the first site without an example batch.
        sites: the number of attention layers, and how many of them are cross attention.
        paddings: which of "none", "left", "right" its batches may have.
        implementations: the values of attn_implementation that it supports.
    """

    name: str
    make: Callable[[float], tuple[type, Any]]
    kind: str
    facts: dict[str, Any]
    sites: tuple[int, int] = (3, 0)
    paddings: tuple[str, ...] = ("none", "left", "right")
    implementations: tuple[str, ...] = ("eager", "sdpa")
    windowed: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def build(self, implementation: str | None = None, dropout: float = 0.0, seed: int = 0) -> nn.Module:
        """Return the model in eval mode, with weights large enough that attention is far from uniform."""
        cls, config = self.make(dropout)
        config._attn_implementation = implementation or self.implementations[-1]
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            model = cls(config)
            randomize(model, seed)
        return model.eval()

    def batch(self, padding: str = "none", seed: int = 0) -> dict[str, Tensor]:
        """Return a batch; `padding` is the side on which its shorter sequences are padded."""
        g = torch.Generator().manual_seed(seed)
        return BATCHES[self.kind](padding, g)

    def is_causal(self, stack: str, is_cross: bool) -> bool:
        """Return whether the attention of a stack is causal."""
        return not is_cross and (self.kind == "decoder" or "decoder" in stack or "text_model" in stack)

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the model's main output on a batch; rows of padded tokens are not set to 0."""
        return main_output(model(**batch))

    def real(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return which rows of the main output belong to real tokens, bool (B, T), or None if all of them do."""
        return batch.get("decoder_attention_mask", batch.get("attention_mask")) if self.kind != "speech" else None


def main_output(output: Any) -> Tensor:
    """Return logits, the last hidden state, or the concatenated image and text embeddings."""
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return torch.cat([output.image_embeds, output.text_embeds])


def randomize(model: nn.Module, seed: int) -> None:
    """Redraw all matrices, biases and sinks, so that no bias is 0 and attention is far from uniform."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=g))


def lengths(padding: str, tokens: int) -> Tensor:
    """Return the number of real tokens in each sequence of the batch."""
    return torch.full((BATCH,), tokens) if padding == "none" else torch.tensor([tokens, tokens - 4, tokens - 1])


def text(padding: str, g: torch.Generator, tokens: int = TOKENS, prefix: str = "") -> dict[str, Tensor]:
    """Return token ids and their mask; without padding there is no mask, so that hosts pass only `is_causal`."""
    ids = torch.randint(3, VOCABULARY, (BATCH, tokens), generator=g)
    if padding == "none":
        return {f"{prefix}input_ids": ids}
    place = torch.arange(tokens) if padding == "right" else torch.arange(tokens - 1, -1, -1)
    mask = (place < lengths(padding, tokens)[:, None]).long()
    return {f"{prefix}input_ids": ids * mask, f"{prefix}attention_mask": mask}


def pixels(padding: str, g: torch.Generator) -> dict[str, Tensor]:
    """Return random pictures."""
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=g)}


def speech(padding: str, g: torch.Generator) -> dict[str, Tensor]:
    """Return random spectrogram frames and decoder tokens."""
    made = {"input_features": torch.randn(BATCH, 8, 24, generator=g), **text("none", g, 6, "decoder_")}
    if padding != "none":
        made["decoder_attention_mask"] = text(padding, g, 6)["attention_mask"]
    return made


BATCHES: dict[str, Callable[[str, torch.Generator], dict[str, Tensor]]] = {
    "decoder": text,
    "encoder": text,
    "encoder-decoder": lambda padding, g: {**text(padding, g), **text(padding, g, 6, "decoder_")},
    "vision": pixels,
    "vision-text": lambda padding, g: {**text(padding, g), **pixels(padding, g)},
    "speech": speech,
}


def _of(prefix: str, model: str = "ForCausalLM", **settings: Any) -> Callable[[float], tuple[type, Any]]:
    """Return a `make` function; settings with the value "dropout" get the requested attention dropout."""

    def make(dropout: float) -> tuple[type, Any]:
        import transformers

        chosen = {k: dropout if x == "dropout" else x for k, x in settings.items()}
        return getattr(transformers, prefix + model), getattr(transformers, f"{prefix}Config")(**chosen)

    return make


def _decoder(prefix: str, **settings: Any) -> Callable[[float], tuple[type, Any]]:
    own = {"num_key_value_heads": 2, "attention_dropout": "dropout", "max_position_embeddings": 64, "head_dim": 8}
    return _of(prefix, **{**TEXT, **SIZES, **own, "tie_word_embeddings": False, **settings})


def _bert(prefix: str, model: str = "Model", **settings: Any) -> Callable[[float], tuple[type, Any]]:
    own = {"attention_probs_dropout_prob": "dropout", "hidden_dropout_prob": 0.0, "max_position_embeddings": 32}
    return _of(prefix, model, **{**TEXT, **SIZES, **own, **settings})


def _vision(prefix: str, **settings: Any) -> Callable[[float], tuple[type, Any]]:
    own = {"attention_probs_dropout_prob": "dropout", "hidden_dropout_prob": 0.0}
    return _of(prefix, "Model", **{**SIZES, **PICTURE, **own, **settings})


def _clip(dropout: float) -> tuple[type, Any]:
    from transformers import CLIPConfig, CLIPModel

    sizes = {**SIZES, "attention_dropout": dropout, "projection_dim": 16}
    words = {**TEXT, **sizes, "max_position_embeddings": 32}
    return CLIPModel, CLIPConfig(text_config=words, vision_config={**sizes, **PICTURE}, projection_dim=16)


GROUPED = {"heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 32, "causal": True, "qk_norm": False, "rope": True}
CAUSAL = {"heads": 4, "kv_heads": 4, "head_dim": 8, "hidden": 32, "causal": True, "qk_norm": False, "rope": False}
ENCODER = {**CAUSAL, "causal": False}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_dropout": "dropout", "dropout": 0.0,
    "activation_dropout": 0.0,
    "decoder_start_token_id": 1,
}  # fmt: skip

_FAMILIES = [
    Family("Llama", _decoder("Llama"), "decoder", GROUPED),
    Family("Mistral", _decoder("Mistral", sliding_window=4), "decoder", GROUPED),
    Family("Qwen3", _decoder("Qwen3"), "decoder", {**GROUPED, "qk_norm": True}),
    Family(
        "Gemma2",
        _decoder("Gemma2", sliding_window=4, attn_logit_softcapping=1.0, query_pre_attn_scalar=8,
        tie_word_embeddings=True),
        "decoder",
        GROUPED,
        implementations=("eager",),
    ),
    Family(
        "GptOss",
        _decoder("GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
        rope_parameters={"rope_type": "default"}),
        "decoder",
        GROUPED,
        implementations=("eager",),
    ),
    Family(
        "GPT2",
        _of("GPT2", "LMHeadModel", **TEXT, n_embd=32, n_layer=3, n_head=4, n_positions=32, attn_pdrop="dropout",
        resid_pdrop=0.0, embd_pdrop=0.0),
        "decoder",
        CAUSAL,
    ),
    Family(
        "OPT",
        _of("OPT", **TEXT, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=48,
        word_embed_proj_dim=32,
            max_position_embeddings=32, attention_dropout="dropout", dropout=0.0),
        "decoder",
        CAUSAL,
    ),
    Family("BERT", _bert("Bert"), "encoder", ENCODER),
    Family("RoBERTa", _bert("Roberta"), "encoder", ENCODER),
    Family(
        "DistilBERT",
        _of("DistilBert", "Model", **TEXT, dim=32, n_layers=3, n_heads=4, hidden_dim=48, max_position_embeddings=32,
            attention_dropout="dropout", dropout=0.0),
        "encoder",
        ENCODER,
    ),
    Family(
        "ModernBERT",
        _of("ModernBert", "Model", **TEXT, **SIZES, cls_token_id=1, sep_token_id=2, local_attention=6,
            global_attn_every_n_layers=2, max_position_embeddings=32, attention_dropout="dropout"),
        "encoder",
        {**ENCODER, "rope": True},
    ),
    Family("ViT", _vision("ViT"), "vision", ENCODER, paddings=("none",)),
    Family("DINOv2", _vision("Dinov2"), "vision", ENCODER, paddings=("none",)),
    Family("CLIP", _clip, "vision-text", CAUSAL, sites=(6, 0)),
    Family(
        "Swin",
        _of("Swin", "Model", image_size=16, patch_size=2, num_channels=3, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
            window_size=2, drop_path_rate=0.0, attention_probs_dropout_prob="dropout"),
        "vision",
        {**ENCODER, "heads": 2, "kv_heads": 2, "hidden": 16},
        sites=(4, 0),
        paddings=("none",),
        windowed=True,
    ),
    Family(
        "T5",
        _of("T5", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=3,
        num_heads=4,
            dropout_rate="dropout", decoder_start_token_id=0, relative_attention_max_distance=8,
            relative_attention_num_buckets=8),
        "encoder-decoder",
        ENCODER,
        sites=(9, 3),
    ),
    Family(
        "BART",
        _of("Bart", "ForConditionalGeneration", **TEXT, **SEQ2SEQ, max_position_embeddings=32),
        "encoder-decoder",
        ENCODER,
        sites=(9, 3),
    ),
    Family(
        "Whisper",
        _of("Whisper", "ForConditionalGeneration", **TEXT, **SEQ2SEQ, num_mel_bins=8, max_source_positions=12,
            max_target_positions=16),
        "speech",
        ENCODER,
        sites=(9, 3),
        paddings=("none", "right"),
    ),
]  # fmt: skip

FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
