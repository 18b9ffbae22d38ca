"""Makes any transformers configuration tiny, and a batch that its model takes."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, BATCH, PIXELS = 97, 12, 2, 32
WIDTH, HEADS, LAYERS = 32, 4, 2

# Patterns of attribute names, tried in order, and what a number under such a name becomes.
RULES: list[tuple[str, int]] = [
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|num_key_value_groups)", 2),
    (r"(.*_)?(num_attention_heads|num_heads|n_head|n_heads|attention_heads|num_head|nhead|encoder_attention_heads)", HEADS),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layer|n_layers|depth|layers|num_blocks|num_.*_layers|max_window_layers)", LAYERS),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|feedforward_dim|dim_feedforward)", 48),
    (r"(d_kv|head_dim|attention_head_dim|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|.*_head_dim|dim_head)", 8),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank)", 16),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|d_embed|embedding_size|emb_dim|width|embedding_dim|input_dim)", WIDTH),
    (r"(.*_)?(projection_dim|projection_size|output_dim|out_hidden_size|decoder_hidden_size|encoder_hidden_dim)", WIDTH),
    (r"(.*_)?(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(.*_)?(num_experts_per_tok|topk_group|n_group|moe_topk|moe_k|num_selected_experts|top_k_experts)", 1),
    (r"(image_size|img_size|pretrain_image_size|input_resolution)", PIXELS),
    (r"patch_size", 8),
    (r"rotary_dim", 4),
    (r"(.*_)?(max_position_embeddings|n_positions|max_sequence_length|max_source_positions|max_target_positions|seq_length|block_size)", 64),
    (r"num_mel_bins", 16),
    (r"(sliding_window|attention_window|local_attention|attention_chunk_size)", 4),
    (r"(num_queries|num_query_tokens|num_latents)", 8),
    (r"first_k_dense_replace", 1),
]
EXACT = re.compile(r"|".join(f"(?P<r{i}>^(?:{pattern})$)" for i, (pattern, _) in enumerate(RULES)))


def shrink(config: Any, depth: int = 0) -> Any:
    """Set the sizes of a configuration, and of those inside it, to tiny ones; lists keep their length."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 4:
            shrink(value, depth + 1)
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            _set(config, name, min(value, 5 + len(name) % 40))
        elif name.endswith("vocab_size") and (value is None or isinstance(value, int)):
            _set(config, name, VOCABULARY)
        elif name == "layer_types" and isinstance(value, list | tuple) and value:
            _set(config, name, [value[0], value[-1]])
        elif (match := EXACT.match(name)) is not None:
            small = RULES[int(match.lastgroup[1:])][1]  # type: ignore[index]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                _set(config, name, small)
            elif isinstance(value, list | tuple) and value and all(isinstance(x, int) for x in value) and small < 8:
                _set(config, name, [2] * len(value))
        elif name == "depths" and isinstance(value, list | tuple):
            _set(config, name, [2] + [1] * (len(value) - 1))
    return config


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:
        return


def build(model_type: str, implementation: str | None = None, seed: int = 0) -> nn.Module:
    """Build a tiny model of a type in evaluation mode, with weights large enough that attention is far from uniform.

    Raises:
        ValueError: where there is no model of the type, or no tiny configuration of it was found.
    """
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    reasons = []
    for config in _configs(config_class, reasons):
        if implementation is not None:
            config._attn_implementation = implementation
        for mapping in ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_PRETRAINING_MAPPING",
                        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_OBJECT_DETECTION_MAPPING", "MODEL_FOR_MASK_GENERATION_MAPPING"):
            known = getattr(modeling_auto, mapping, {})
            if config_class not in known:
                continue
            cls = known[config_class]
            cls = cls[0] if isinstance(cls, tuple) else cls
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in cls(config).parameters())
                if size > 8_000_000:
                    reasons.append(f"{size / 1e6:.0f} million parameters")
                    break
                torch.manual_seed(seed)
                model = cls(config)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160])
                break
            _randomize(model, seed)
            return model.eval()
    raise ValueError(reasons[0] if reasons else "no model class")


def _configs(config_class: type, reasons: list[str]) -> Iterator[Any]:
    try:
        config = config_class()
        yield shrink(config)
        # Some sizes are derived in the constructor: build it anew from the small ones.
        yield shrink(config_class(**{k: v for k, v in shrink(config_class()).to_dict().items() if k != "model_type"}))
    except Exception as error:
        reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160])


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
    for batch in _candidates(model, names):
        try:
            with torch.no_grad():
                model(**batch)
            return batch
        except Exception as error:
            first = first or error
    raise ValueError(f"no input fits: {type(first).__name__}: {str(first).strip().splitlines()[0] if str(first).strip() else ''}"[:160])


def _candidates(model: nn.Module, names: set[str]) -> Iterator[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    channels = _find(model.config, "num_channels", "in_channels", "in_chans") or 3
    size = _find(model.config, "image_size", "img_size") or PIXELS
    mel = _find(model.config, "num_mel_bins", "input_feat_per_channel", "feature_size") or 16
    words = torch.randint(60, VOCABULARY - 5, (BATCH, TOKENS), generator=g)
    parts: dict[str, list[Tensor]] = {
        "input_ids": [words],
        "decoder_input_ids": [words[:, :7]],
        "pixel_values": [torch.randn(BATCH, channels, n, n, generator=g) for n in (size, 64, 128)] + [torch.randn(BATCH, 4, channels, size, size, generator=g)],
        "pixel_values_videos": [torch.randn(BATCH, 4, channels, size, size, generator=g)],
        "input_values": [torch.randn(BATCH, 4000, generator=g), torch.randn(BATCH, 1, 4000, generator=g), torch.randn(BATCH, 64, mel, generator=g)],
        "input_features": [torch.randn(BATCH, n, m, generator=g) for n, m in ((mel, 128), (64, mel), (mel, 3000))],
        "past_values": [torch.randn(BATCH, n, generator=g) for n in (32, 64, 512)] + [torch.randn(BATCH, 32, 1, generator=g)],
        "inputs_embeds": [torch.randn(BATCH, TOKENS, WIDTH, generator=g)],
        "bbox": [torch.randint(0, 20, (BATCH, TOKENS, 4), generator=g)],
    }
    present = [n for n in parts if n in names]
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
