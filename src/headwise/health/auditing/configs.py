"""Configs of transformers folders: building from them safely, and checks of their sizes against the tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.files import foreign_models
from headwise.files.errors import CheckpointError
from headwise.files.foreign_models import quantization_of
from headwise.files.optional_imports import load, quiet_transformers
from headwise.files.tensor_files import explained

DEPTH = re.compile(r"^(num_|n_)?(hidden_|encoder_|decoder_)?layers?$|^num_(en|de)coder_layers$|^depths?$")
# Experts are counted too, but may be stacked in one tensor.
EXPERTS = re.compile(r"^(num|n|moe_num)_(local_|routed_)?experts$")
DAMAGED = ": a setting is wrong or damaged"


def check_depths(
    folder: Path, config: Any, shapes: dict[str, tuple[int, ...]], build: Callable[[Any], nn.Module]
) -> None:
    """Raise CheckpointError if a config claims more layers or experts than the files can hold.

    Without this check, a model of thousands of layers would be built for a minute before a missing weight is found.

    Raises:
        CheckpointError: if so; the message names the setting, its value and the number of layers in the tensors.
    """
    numbered = 1 + max((int(n) for name in shapes for n in re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)), default=-1)
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    for path, name, claimed in _claims(config):
        available = numbered if DEPTH.match(name) else max(numbered, longest)
        if claimed > available and _builds_as_many(config, path, name, build):
            unit = "layers" if DEPTH.match(name) else "experts"
            raise CheckpointError(
                f"{folder / 'config.json'} claims {'.'.join((*path, name))}={claimed:,}, and the tensors of {folder} "
                f"are numbered for {numbered} {unit} at most: weights and config do not belong together"
            )


def _claims(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, int]]:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and len(path) < 3:
            yield from _claims(value, (*path, name))
        elif DEPTH.match(name) or EXPERTS.match(name):
            numbers = value if isinstance(value, list | tuple) else [value]
            if numbers and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
                yield path, name, max(numbers)


def _builds_as_many(config: Any, path: tuple[str, ...], name: str, build: Callable[[Any], nn.Module]) -> bool:
    """Return whether a larger value of the setting adds weights: ALBERT shares them, and some parts are never built."""
    try:
        with_one, with_two = (len(build(_small(config, path, name, count)).state_dict()) for count in (1, 2))
    except Exception:
        # A fault of the config is reported when the whole config is built.
        return False
    return with_two > with_one


def _small(config: Any, path: tuple[str, ...], name: str, count: int) -> Any:
    small = copy.deepcopy(config)
    for place, key, claimed in list(_claims(small)):
        part = small
        for step in place:
            part = getattr(part, step)
        value = getattr(part, key)
        # All other counts become 2, not 1, because one of two layers may be sparse.
        chosen = count if (place, key) == (path, name) else min(claimed, 2)
        setattr(part, key, [chosen] * len(value) if isinstance(value, list | tuple) else chosen)
        _cut_lists(part, value, chosen)
    return small


def _cut_lists(part: Any, claimed: Any, length: int) -> None:
    """Shorten lists that have an entry per layer, such as the kinds of the layers."""
    for key, value in list(vars(part).items()):
        if isinstance(claimed, int) and isinstance(value, list) and len(value) == claimed:
            setattr(part, key, value[:length])


def config_of(folder: Path, settings: dict[str, Any]) -> Any:
    """Return the config of a folder from its settings, without those that choose code.

    Raises:
        CheckpointError: if the type is unknown, the weights are quantized or a setting is invalid.
    """
    file = folder / "config.json"
    _check_type(file, settings)
    if quantized := quantization_of(settings):
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
        raise CheckpointError(
            f"{folder} is quantized ({method}), and spectra need the weights themselves: audit the model it was made "
            "from"
        )
    with explained(f"{file} cannot be read as a config", DAMAGED), quiet_transformers():
        return foreign_models.config_of(settings)


def structure_of(folder: Path, config: Any, settings: dict[str, Any]) -> nn.Module:
    """Return the model of a config on the meta device.

    Raises:
        CheckpointError: if no model can be built from it.
    """
    transformers, file = load("transformers", "hf"), folder / "config.json"
    names = settings.get("architectures") or [None]
    architecture = names[0] if isinstance(names, list) else names
    if architecture is not None and not isinstance(architecture, str):
        raise CheckpointError(f"{file} names the architecture {architecture!r}, which must be the name of a class")
    value = getattr(transformers, architecture, None) if architecture else None
    cls: Any = value if isinstance(value, type) and issubclass(value, transformers.PreTrainedModel) else None
    if cls is not None and not isinstance(config, cls.config_class):
        raise CheckpointError(
            f"{file} has the model type {settings['model_type']!r}, and the architecture {architecture} belongs to "
            "another: correct one of them"
        )
    with torch.device("meta"), explained(f"{file} gives no model", DAMAGED), quiet_transformers():
        return cls(config) if cls is not None else transformers.AutoModel.from_config(config)


def _check_type(file: Path, settings: dict[str, Any]) -> None:
    transformers = load("transformers", "hf")
    kind = settings.get("model_type")
    if kind is None:
        raise CheckpointError(f"{file} has no model_type: it is not a config of transformers")
    if isinstance(kind, str) and kind in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        return
    if "auto_map" in settings:
        raise CheckpointError(
            f"the model type {kind!r} of {file.parent} lives in code of the checkpoint, which headwise never runs. "
            "Load the model yourself and pass it as module.py:factory"
        )
    raise CheckpointError(
        f"transformers {transformers.__version__} knows no model type {kind!r} ({file}): update transformers, or pass "
        "module.py:factory"
    )
