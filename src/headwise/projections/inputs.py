"""Inputs on which a model or a single attention layer can be run to determine its layout."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.site import Site
from headwise.projections.leaves import leaves

# Few, as only the layout matters; more than one, so that tokens and heads are not confused.
TOKENS = 6


def ways(site: Site, model: nn.Module | None, example: Any) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Yield the ways to reach the site, (module, function that runs it), the cheapest first: the layer alone, the model
    on the example, and the model on a synthesised batch."""
    yield site.module, lambda: site.module(alone(site))
    if example is not None and model is not None:
        small = first_sample(example)
        if small is not None:
            yield model, lambda: feed(model, small)
        yield model, lambda: feed(model, example)
    if model is not None:
        for owner in (module for _, module in model.named_modules() if _takes_config(module, site.module)):
            yield owner, functools.partial(_run_synthesised, owner)


def _run_synthesised(owner: nn.Module) -> Any:
    return owner(**synthesised(owner))


def feed(model: nn.Module, example: Any) -> Any:
    """Call the model on a batch: a mapping as keywords, a sequence as arguments, anything else as one argument."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


def first_sample(example: Any) -> Any:
    """Return the first sample of a batch, or None if its tensors share no first dimension above 1."""
    if isinstance(example, Tensor):
        return example[:1] if example.dim() > 1 and len(example) > 1 else None
    is_mapping = isinstance(example, Mapping)
    values = (
        list(example.values() if is_mapping else example) if is_mapping or isinstance(example, (tuple, list)) else []
    )
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or any(t.dim() < 1 for t in tensors) or len({len(t) for t in tensors}) != 1 or len(tensors[0]) < 2:
        return None
    small = [value[:1] if isinstance(value, Tensor) else value for value in values]
    return dict(zip(example, small, strict=True)) if is_mapping else small


def _takes_config(module: nn.Module, inner: nn.Module) -> bool:
    return (
        hasattr(module, "main_input_name") and hasattr(module, "config") and any(m is inner for m in module.modules())
    )


def _random(*shape: int, like: Tensor) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(device=like.device, dtype=like.dtype)


def alone(site: Site) -> Tensor:
    """Return a random input (1, T, C) for the attention module alone."""
    candidates = leaves(site.module, site.name)
    if not candidates:
        raise ValueError("no projections")
    window = getattr(site.module, "window_area", None) or getattr(site.module, "seq_len", None)
    return _random(1, window if isinstance(window, int) else TOKENS, candidates[0].columns, like=candidates[0].weight)


def synthesised(model: nn.Module) -> dict[str, Tensor | bool]:
    """Return a small batch for a transformers model, from its config and the arguments of its forward."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    like = next(p for p in model.parameters() if p.is_floating_point())
    batch: dict[str, Tensor | bool] = {}
    vocabulary = _first(config, "vocab_size")
    if vocabulary:
        ids = torch.arange(3, 3 + TOKENS, device=like.device)[None] % vocabulary
        batch |= {name: ids for name in ("input_ids", "decoder_input_ids") if name in names}
    image, channels = _first(config, "image_size"), _first(config, "num_channels") or 3
    if image:
        height, width = image if isinstance(image, (list, tuple)) else (image, image)
        batch["pixel_values"] = _random(1, channels, height, width, like=like)
    bins = _first(config, "num_mel_bins")
    if bins and (length := _first(config, "max_source_positions")):
        batch["input_features"] = _random(1, bins, 2 * length, like=like)
    elif "input_values" in names:
        batch["input_values"] = _random(1, 4000, like=like)
    if "input_features" in batch or getattr(model, "main_input_name", "") == "pixel_values":
        batch.pop("input_ids", None)
    if getattr(config, "add_cross_attention", False):
        batch["encoder_hidden_states"] = _random(1, TOKENS + 2, config.hidden_size, like=like)
    batch["use_cache"] = False
    return {name: value for name, value in batch.items() if name in names}


def _first(config: Any, name: str) -> Any:
    """Return a setting of a config or of its text_config or vision_config, or None."""
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        if getattr(part, name, None) is not None:
            return getattr(part, name)
    return None
