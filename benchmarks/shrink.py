"""Makes any transformers configuration tiny, and a batch that its model takes."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, BATCH, PIXELS = 97, 12, 2, 32
WIDTH, HEADS, LAYERS, LARGEST = 32, 4, 2, 45_000_000

# Patterns of attribute names, tried in order, and what a number under such a name becomes.
RULES: list[tuple[str, int]] = [
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|num_key_value_groups)", 2),
    (
        r"(.*_)?(num_attention_heads|num_heads|n_head|n_heads|attention_heads|num_head|nhead|encoder_attention_heads)",
        HEADS,
    ),
    (
        r"(.*_)?(num_hidden_layers|num_layers|n_layer|n_layers|depth|layers|num_blocks|num_.*_layers|max_window_layers)",
        LAYERS,
    ),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|feedforward_dim|dim_feedforward)", 48),
    (r"(d_kv|head_dim|attention_head_dim|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|.*_head_dim|dim_head)", 8),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank)", 16),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|d_embed|embedding_size|emb_dim|width|embedding_dim|input_dim)",
        WIDTH,
    ),
    (
        r"(.*_)?(projection_dim|projection_size|output_dim|out_hidden_size|decoder_hidden_size|encoder_hidden_dim)",
        WIDTH,
    ),
    (r"(.*_)?(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(.*_)?(num_experts_per_tok|topk_group|n_group|moe_topk|moe_k|num_selected_experts|top_k_experts)", 1),
    (r"(image_size|img_size|pretrain_image_size|input_resolution)", PIXELS),
    (r"patch_size", 4),
    (r"rotary_dim", 4),
    (
        r"(.*_)?(max_position_embeddings|n_positions|max_sequence_length|max_source_positions|max_target_positions|seq_length|block_size)",
        64,
    ),
    (r"num_mel_bins", 16),
    (r"window_size", 2),
    (r"(sliding_window|attention_window|local_attention|attention_chunk_size)", 4),
    (r"(num_queries|num_query_tokens|num_latents)", 8),
    (r"first_k_dense_replace", 1),
]
EXACT = re.compile(r"|".join(f"(?P<r{i}>^(?:{pattern})$)" for i, (pattern, _) in enumerate(RULES)))


def small(config: Any, depth: int = 0) -> dict[str, Any]:
    """Give the settings of a configuration, and of those inside it, that must change for a tiny model."""
    changes: dict[str, Any] = {}
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 4:
            changes[name] = {"model_type": value.model_type} if getattr(value, "model_type", "") else {}
            changes[name] |= small(value, depth + 1)
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            changes[name] = min(value, 5 + len(name) % 40)
        elif name.endswith("vocab_size") and (value is None or isinstance(value, int)):
            changes[name] = VOCABULARY
        elif name == "depths" and isinstance(value, list | tuple):
            changes[name] = [2] + [1] * (len(value) - 1)
        elif (match := EXACT.match(name)) is not None:
            size = RULES[int(match.lastgroup[1:])][1]  # type: ignore[index]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                changes[name] = size
            elif isinstance(value, list | tuple) and value and all(isinstance(x, int) for x in value) and size < 8:
                changes[name] = [2] * len(value)
    return changes


def shrink(config: Any) -> Any:
    """Set the small sizes on a configuration that exists; what it derived from the large ones is cut."""
    _apply(config, small(config))
    return config


def _apply(config: Any, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict):
            _apply(getattr(config, name), value)
        elif name != "model_type":
            with contextlib.suppress(Exception):
                setattr(config, name, value)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list | tuple) and len(kinds) > LAYERS:
        config.layer_types = [kinds[0], kinds[-1]]


MAPPINGS = (
    "MODEL_MAPPING MODEL_FOR_CAUSAL_LM_MAPPING MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING MODEL_FOR_PRETRAINING_MAPPING "
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING MODEL_FOR_OBJECT_DETECTION_MAPPING MODEL_FOR_MASK_GENERATION_MAPPING "
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING"
).split()


def build(model_type: str, implementation: str | None = None, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a tiny model of a type in evaluation mode, with attention far from uniform, and a batch that it runs on.

    Raises:
        ValueError: where there is no model of the type, or no tiny configuration or no batch was found for it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    cls = _model_class(config_class)
    reasons: list[str] = []
    for config in _configs(config_class, reasons):
        if implementation is not None:
            config._attn_implementation = implementation
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size / 1e6:.0f} million parameters remain")
            torch.manual_seed(seed)
            model = cls(config).eval()
            _randomize(model, seed)
            return model, inputs(model)
        except Exception as error:
            reasons.append(_line(error))
    raise ValueError(reasons[0])


def _model_class(config_class: type) -> type:
    from transformers.models.auto import modeling_auto

    for mapping in MAPPINGS:
        known = getattr(modeling_auto, mapping, {})
        if config_class in known:
            cls = known[config_class]
            return cls[0] if isinstance(cls, tuple) else cls
    raise ValueError("it has no model class of its own")


def _configs(config_class: type, reasons: list[str]) -> Iterator[Any]:
    # Built from small sizes where the constructor takes them, so that it derives the rest; changed afterwards where not.
    for make in (
        lambda: config_class(**small(config_class())),
        lambda: shrink(config_class(**small(config_class()))),
        lambda: shrink(config_class()),
    ):
        try:
            yield make()
        except Exception as error:
            reasons.append(_line(error))


def _line(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


def _randomize(model: nn.Module, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=g))
            elif name.endswith("sinks"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """Find a batch that the model runs on.

    Raises:
        ValueError: with the first error, where none of those tried fits.
    """
    names = set(inspect.signature(model.forward).parameters)
    first: Exception | None = None
    for batch in itertools.islice(_candidates(model, names), 12):
        try:
            with torch.no_grad():
                model(**batch)
            return batch
        except Exception as error:
            # The first shape of each input is the likeliest: its error says most.
            first = first or error
    raise ValueError(f"no input fits: {_line(first)}")


def _candidates(model: nn.Module, names: set[str]) -> Iterator[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    channels = _find(model.config, "num_channels", "in_channels", "in_chans") or 3
    size = _find(model.config, "image_size", "img_size") or PIXELS
    mel = _find(model.config, "num_mel_bins", "input_feat_per_channel", "feature_size") or 16
    words = torch.randint(60, VOCABULARY - 5, (BATCH, TOKENS), generator=g)
    parts: dict[str, list[Tensor]] = {
        "input_ids": [words],
        "decoder_input_ids": [words[:, :7]],
        "pixel_values": [torch.randn(BATCH, channels, n, n, generator=g) for n in (size, 64, 128)]
        + [torch.randn(BATCH, 4, channels, size, size, generator=g)],
        "pixel_values_videos": [torch.randn(BATCH, 4, channels, size, size, generator=g)],
        "input_values": [
            torch.randn(BATCH, 4000, generator=g),
            torch.randn(BATCH, 1, 4000, generator=g),
            torch.randn(BATCH, 64, mel, generator=g),
        ],
        "input_features": [torch.randn(BATCH, n, m, generator=g) for n, m in ((mel, 128), (64, mel), (mel, 3000))],
        "past_values": [torch.randn(BATCH, n, generator=g) for n in (32, 64, 512)]
        + [torch.randn(BATCH, 32, 1, generator=g)],
        "inputs_embeds": [torch.randn(BATCH, TOKENS, WIDTH, generator=g)],
        "bbox": [torch.randint(0, 20, (BATCH, TOKENS, 4), generator=g)],
    }
    present = [n for n in parts if n in names and not (n == "inputs_embeds" and "input_ids" in names)]
    chosen = [c for r in (1, 2, 3) for c in itertools.combinations(present, r)]
    for names_ in chosen:
        for tensors in itertools.product(*(parts[n] for n in names_)):
            yield dict(zip(names_, tensors, strict=True))


def _find(config: Any, *names: str) -> int | None:
    for owner in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                return value[0]
    return None
