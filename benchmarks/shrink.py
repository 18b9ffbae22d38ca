"""Make any transformers configuration tiny, and a batch that its model takes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, BATCH, PIXELS = 97, 12, 2, 32
WIDTH, HEADS, LAYERS, LARGEST = 32, 4, 2, 150_000_000

# Patterns of attribute names, tried in order, and the value that a number under a matching name gets.
RULES: list[tuple[str, int]] = [
    (r"rotary_dim", 4),
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
    (r"(.*_)?(num_experts_per_tok(en)?|topk_group|n_group|moe_topk|moe_k|num_selected_experts|top_k_experts)", 1),
    (r"(image_size|img_size|pretrain_image_size|input_resolution)", PIXELS),
    (r"patch_size", 4),
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
# The reduced sizes if the full set leads to inconsistent sizes: the widths are then unchanged.
DEPTHS = re.compile(
    r"(.*_)?(num_hidden_layers|num_layers|n_layers?|depth|encoder_layers|decoder_layers|num_.*_layers|max_window_layers)|layers"
)
EXACT = re.compile(r"|".join(f"(?P<r{i}>^(?:{pattern})$)" for i, (pattern, _) in enumerate(RULES)))


def small(config: Any, depth: int = 0) -> dict[str, Any]:
    """Return the settings of a configuration, and of those inside it, that must change for a tiny model."""
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


def thin(config: Any, depth: int = 0) -> Any:
    """Cut the layers and the vocabulary of an existing configuration, and keep its widths."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 4:
            thin(value, depth + 1)
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            _set(config, name, min(value, 5 + len(name) % 40))
        elif name.endswith("vocab_size") and isinstance(value, int):
            _set(config, name, VOCABULARY)
        elif DEPTHS.fullmatch(name) and isinstance(value, int) and not isinstance(value, bool) and value > LAYERS:
            _set(config, name, LAYERS)
    _cut_kinds(config)
    return config


def _set(config: Any, name: str, value: Any) -> None:
    # Some settings are read-only, others are validated: settings that cannot be changed keep their size.
    with contextlib.suppress(Exception):
        setattr(config, name, value)


def shrink(config: Any) -> Any:
    """Set the small sizes on an existing configuration; sizes that it derived from the large ones are cut."""
    _apply(config, small(config))
    return config


def _apply(config: Any, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict):
            _apply(getattr(config, name), value)
        elif name != "model_type":
            _set(config, name, value)
    _cut_kinds(config)


def _cut_kinds(config: Any) -> None:
    for name, kinds in list(vars(config).items()):
        if isinstance(kinds, list) and len(kinds) > LAYERS and all(isinstance(kind, str) for kind in kinds):
            _set(config, name, _both_kinds(kinds) if "attention" in " ".join(kinds) else [kinds[0], kinds[-1]])


def _both_kinds(kinds: list[str]) -> list[str]:
    """Return two layers: one of attention proper, and one of another kind if there is one."""
    whole = next((k for k in kinds if "attention" in k and "linear" not in k), kinds[-1])
    return [next((k for k in kinds if k != whole), whole), whole]


def _code(config_class: type) -> str:
    """Return the text of a type's model file: sections of rotary positions have their large defaults there."""
    file = Path(sys.modules[config_class.__module__].__file__ or "")
    model = file.with_name(file.name.replace("configuration_", "modeling_"))
    return model.read_text(encoding="utf-8") if model.is_file() else ""


# Settings that some configurations leave to the checkpoint, and models need.
UNSAID = {
    "prediction_length": 4, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 1, "layer_types": ["full_attention"] * LAYERS, "context_length": 8, "num_experts": 4,
    "top_k_experts": 1, "moe_intermediate_size": 16, "dropout": 0.0, "dropout_rate": 0.0,
}  # fmt: skip


def _agree(config: Any) -> None:
    """Set what must agree with the small sizes: sections of rotary positions, periods of layers, latent heads,
    windows."""
    # A cache that keeps states instead of keys has no lengths.
    changes: dict[str, Any] = {
        "use_cache": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attn_layer_indices": [1],
    }
    if getattr(config, "kv_lora_rank", None):
        changes["num_key_value_heads"] = HEADS
    if hasattr(config, "depths") and hasattr(config, "window_size"):
        # Four stages each halve the grid, down to one window.
        changes["image_size"] = 2 * PIXELS
    for name, value in changes.items():
        if hasattr(config, name):
            with contextlib.suppress(Exception):
                setattr(config, name, value)
    for name, value in UNSAID.items():
        # models of some types read a dropout that their configurations do not have
        if getattr(config, name, None) is None and (hasattr(config, name) or name.startswith("dropout")):
            _set(config, name, value)
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    # not read as an attribute, which raises an error if layers differ in it
    if vars(config).get("head_dim", 0) is None and isinstance(width, int) and isinstance(heads, int):
        _set(config, "head_dim", width // heads)
    if set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:
        _set(config, "layer_types", ["linear_attention", "full_attention"])
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope and rope.get("rope_theta") is None:
        rope["rope_theta"] = 10_000.0
    for holder in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(holder, dict) and ("mrope_section" in holder or "mrope_section" in _code(type(config))):
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            half = (
                int(size * (holder.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", 1.0))) // 2
            )
            holder["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


MAPPINGS = (
    "MODEL_MAPPING MODEL_FOR_CAUSAL_LM_MAPPING MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING MODEL_FOR_PRETRAINING_MAPPING "
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING MODEL_FOR_OBJECT_DETECTION_MAPPING MODEL_FOR_MASK_GENERATION_MAPPING "
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING"
).split()


def build(model_type: str, implementation: str | None = None, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a tiny model of a type in evaluation mode, with attention far from uniform, and a batch that it runs on.

    Raises:
        ValueError: if there is no model of the type, or no tiny configuration or no batch was found for it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    reasons: list[str] = []
    for cls, config in ((c, made) for c in _model_classes(config_class) for made in _configs(config_class, reasons)):
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


def outline(model_type: str) -> nn.Module:
    """Return a model of a type without weights (meta device), as small as its configuration allows; it cannot be run.

    Raises:
        ValueError: with the first reason, if there is no model of the type or none could be built.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    reasons: list[str] = []
    for cls in _model_classes(config_class):
        for config in itertools.chain(_configs(config_class, reasons), _plain(config_class, reasons)):
            try:
                with torch.device("meta"):
                    model: nn.Module = cls(config).eval()
                return model
            except Exception as error:
                reasons.append(_line(error))
    raise ValueError(reasons[0])


def _plain(config_class: type, reasons: list[str]) -> Iterator[Any]:
    try:
        yield config_class()
    except Exception as error:
        reasons.append(_line(error))


def _model_classes(config_class: type) -> list[type]:
    """Return the classes of models to try: the one that the Auto classes know, else those of the type's own file.

    Raises:
        ValueError: if the type has no model.
    """
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    for mapping in MAPPINGS:
        known = getattr(modeling_auto, mapping, {})
        if config_class in known:
            cls = known[config_class]
            return [cls[0] if isinstance(cls, tuple) else cls]
    try:
        file = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        raise ValueError("it has no model class") from None
    own = [
        cls
        for name, cls in vars(file).items()
        if isinstance(cls, type)
        and issubclass(cls, PreTrainedModel)
        and getattr(cls, "config_class", None) is config_class
        and not name.endswith("PreTrainedModel")
    ]
    if not own:
        raise ValueError("it has no model class")
    # The bare model first; those with heads wrap it.
    return sorted(own, key=lambda cls: (not cls.__name__.endswith("Model"), len(cls.__name__)))[:2]


def _configs(config_class: type, reasons: list[str]) -> Iterator[Any]:
    # Built from small sizes if the constructor takes them, so that it derives the rest; changed afterwards if
    # not.
    for make in (
        lambda: config_class(**small(config_class())),
        lambda: shrink(config_class(**small(config_class()))),
        lambda: shrink(config_class()),
        lambda: thin(config_class()),
    ):
        try:
            yield _agreeing(make())
        except Exception as error:
            reasons.append(_line(error))


def _agreeing(config: Any, depth: int = 0) -> Any:
    for part in list(vars(config).values()):
        if hasattr(part, "to_dict") and depth < 4:
            _agreeing(part, depth + 1)
    _agree(config)
    return config


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
    """Return a batch on which the model runs.

    Raises:
        ValueError: with the first error, if none of those tried fits.
    """
    names = set(inspect.signature(model.forward).parameters)
    first: Exception | None = None
    for batch in itertools.islice(_candidates(model, names), 40):
        try:
            with torch.no_grad():
                model(**batch)
            return batch
        except Exception as error:
            # The first shape of each input is the likeliest: its error is the most informative.
            first = first or error
    raise ValueError(f"no input fits: {_line(first)}")


# Inputs that carry the data, one of which nearly every model takes; the others accompany them.
MAIN = (
    "input_ids pixel_values input_values input_features past_values hidden_states inputs_embeds flattened_patches "
    "decoder_input_ids pixel_values_videos inputs input latents"
).split()


def _candidates(model: nn.Module, names: set[str]) -> Iterator[dict[str, Tensor]]:
    """Return batches to try: the inputs that the forward requires, then all that it knows, then one to three main
    inputs."""
    parts = _parts(model.config)
    required = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty and name in parts
    ]
    main = [n for n in MAIN if n in names and not (n == "inputs_embeds" and "input_ids" in names)]
    known = [n for n in parts if n in names and n not in ("inputs_embeds", "latents", "input", "inputs")]
    sets: list[tuple[str, ...]] = [tuple(dict.fromkeys([*required, *([] if required else main[:1])]))]
    sets += [tuple(dict.fromkeys([*required, n])) for n in main]
    sets += [tuple(dict.fromkeys([*required, *c])) for r in (2, 3) for c in itertools.combinations(main, r)]
    sets.insert(4, tuple(known))
    sets.insert(5, tuple(n for n in known if "video" not in n))
    for chosen in dict.fromkeys(c for c in sets if c):
        for tensors in itertools.islice(itertools.product(*(parts[n] for n in chosen)), 12):
            yield dict(zip(chosen, tensors, strict=True))


def _parts(config: Any) -> dict[str, list[Tensor]]:
    """Return, for each name of an input, the tensors that models take under it, the likeliest first."""
    g = torch.Generator().manual_seed(0)
    channels = _find(config, "num_channels", "in_channels", "in_chans") or 3
    size = _find(config, "image_size", "img_size") or PIXELS
    mel = (
        _find(
            config, "num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "n_mels"
        )
        or 16
    )
    patch = _find(config, "patch_size", "spatial_patch_size") or 4
    frames = _find(config, "num_frames", "temporal_patch_size") or 4
    flat = channels * (_find(config, "temporal_patch_size") or 1) * patch * patch
    draw = lambda *shape: torch.randn(*shape, generator=g)
    words = torch.randint(60, VOCABULARY - 5, (BATCH, TOKENS), generator=g)
    boxes = torch.randint(0, 20, (BATCH, TOKENS, 4), generator=g).sort(-1).values
    pictures = [draw(BATCH, channels, n, n) for n in (size, 64, 128)]
    films = [draw(BATCH, n, channels, size, size) for n in (frames, 4)]
    grid, rows = torch.tensor([[1, 4, 4], [1, 4, 4]]), 32
    sound = [draw(BATCH, n, m) for n, m in ((mel, 128), (64, mel), (mel, 3000))]
    series = [draw(BATCH, n) for n in (32, 64, 512)] + [draw(BATCH, 32, 1)]
    tall = [
        draw(rows, flat),
        draw(rows, channels, patch, patch),
        draw(1, rows, flat),
        draw(1, rows, channels, patch, patch),
    ]
    width = _find(config, "hidden_size", "d_model", "dim") or WIDTH
    return {
        "input_ids": [words],
        "decoder_input_ids": [words[:, :7]],
        "pixel_values": [*pictures, *films, *tall, draw(BATCH, 16, flat)],
        "pixel_values_videos": films,
        "hidden_states": [draw(rows, flat), draw(BATCH, TOKENS, width), draw(rows, width), draw(BATCH, width, 16)],
        "grid_thw": [grid],
        "image_grid_thw": [grid],
        "merge_sizes": [torch.tensor([2, 2])],
        "spatial_shapes": [torch.tensor([[4, 4], [4, 4]])],
        "target_sizes": [torch.tensor([[4, 4], [4, 4]])],
        "pixel_attention_mask": [
            torch.ones(BATCH, 16, dtype=torch.long),
            torch.ones(BATCH, size, size, dtype=torch.long),
        ],
        "pixel_position_ids": [
            torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)
        ],
        "flattened_patches": [draw(BATCH, 16, flat + 2).abs()],
        "input_values": [
            draw(BATCH, 4000),
            draw(BATCH, 1, 4000),
            draw(BATCH, 64, mel),
            draw(BATCH, 3840),
            draw(BATCH, 1024, mel),
        ],
        "input_features": [*sound, draw(BATCH, 1, 64, mel), draw(BATCH, 64, 160)],
        "input_features_mask": [torch.ones(BATCH, n, dtype=torch.long) for n in (128, 64, 3000)],
        "past_values": series,
        "past_time_features": [draw(BATCH, 32, 1)],
        "past_observed_mask": [torch.ones_like(x) for x in series],
        "past_values_padding": [torch.zeros_like(x) for x in series],
        "freq": [torch.zeros(BATCH, 1, dtype=torch.long)],
        "qformer_input_ids": [words],
        "prompt_pixel_values": pictures,
        "prompt_masks": pictures,
        "visual_feats": [draw(BATCH, 5, 2048), draw(BATCH, 5, width)],
        "visual_pos": [draw(BATCH, 5, 4).abs()],
        "query_embeds": [draw(BATCH, 8, width)],
        "task_inputs": [words],
        "inputs": [draw(BATCH, TOKENS, width), words],
        "input": [draw(BATCH, TOKENS, width), words],
        "latents": [draw(BATCH, TOKENS, width)],
        "inputs_embeds": [draw(BATCH, TOKENS, width)],
        "bbox": [boxes, boxes.float() / 20],
    }


def _find(config: Any, *names: str) -> int | None:
    for owner in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                return value[0]
    return None
