"""What a configuration says of a checkpoint's layers, held against its tensors."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.files.errors import CheckpointError
from headwise.files.optional_imports import load

DEPTH = re.compile(r"^(num_|n_)?(hidden_|encoder_|decoder_)?layers?$|^num_(en|de)coder_layers$|^depths?$")
# Parts of a model that come in numbers too, and may lie stacked in one tensor.
EXPERTS = re.compile(r"^(num|n|moe_num)_(local_|routed_)?experts$")


def check_depths(
    folder: Path, config: Any, shapes: dict[str, tuple[int, ...]], build: Callable[[Any], nn.Module]
) -> None:
    """Refuse a config that claims more layers or experts than the files can hold.

    A model of thousands of layers takes a minute to build before its first missing weight would be named.

    Args:
        folder: the checkpoint's, for the message.
        config: the config, and its parts.
        shapes: the shape of every tensor that exists.
        build: makes the structure of a config on no device.

    Raises:
        CheckpointError: naming the setting, its value and how many layers the tensors are numbered for.
    """
    numbered = 1 + max((int(n) for name in shapes for n in re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)), default=-1)
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    for path, name, claimed in _claims(config):
        held = numbered if DEPTH.match(name) else max(numbered, longest)
        if claimed > held and _builds_as_many(config, path, name, build):
            what = "layers" if DEPTH.match(name) else "experts"
            raise CheckpointError(
                f"{folder / 'config.json'} claims {'.'.join((*path, name))}={claimed:,}, and the tensors of {folder} "
                f"are numbered for {numbered} {what} at most: weights and config do not belong together"
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
    """Return whether the setting makes weights of its own: ALBERT's layers share theirs, and some parts are not built
    at all."""
    try:
        one, two = (len(build(_small(config, path, name, count)).state_dict()) for count in (1, 2))
    except Exception:
        # What is wrong with the config is told where it is built as it stands.
        return False
    return two > one


def _small(config: Any, path: tuple[str, ...], name: str, count: int) -> Any:
    small = copy.deepcopy(config)
    for place, key, claimed in list(_claims(small)):
        part = small
        for step in place:
            part = getattr(part, step)
        value = getattr(part, key)
        # Two of all others: of two layers one may be sparse.
        chosen = count if (place, key) == (path, name) else min(claimed, 2)
        setattr(part, key, [chosen] * len(value) if isinstance(value, list | tuple) else chosen)
        _cut_lists(part, value, chosen)
    return small


def _cut_lists(part: Any, claimed: Any, kept: int) -> None:
    """Cut lists with an entry per layer, such as the kinds of the layers."""
    for key, value in list(vars(part).items()):
        if isinstance(claimed, int) and isinstance(value, list) and len(value) == claimed:
            setattr(part, key, value[:kept])


# A name such as "kernels-community/..." in one of these makes transformers fetch a kernel and run it.
FETCHING = re.compile(r"_?(attn|experts)_implementation\w*|use_kernels|auto_map")


def config_of(folder: Path, settings: dict[str, Any]) -> Any:
    """Make the config of a folder from its settings; which attention computes is left to transformers itself.

    Raises:
        CheckpointError: if the type is unknown, the weights are quantized or a setting is no such setting.
    """
    transformers, file = load("transformers", "hf"), folder / "config.json"
    _check_type(file, settings)
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
        raise CheckpointError(
            f"{folder} is quantized ({method}); its integers are no weights to take spectra of. Audit the model it "
            "was made from"
        )
    with tempfile.TemporaryDirectory() as place, _refused(file, "cannot be read as a config"), quiet():
        (Path(place) / "config.json").write_text(json.dumps(_harmless(settings)), encoding="utf-8")
        return transformers.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)


def structure_of(folder: Path, config: Any, settings: dict[str, Any]) -> nn.Module:
    """Build the model of a config on no device.

    Raises:
        CheckpointError: if no model can be built from it.
    """
    transformers, file = load("transformers", "hf"), folder / "config.json"
    named = settings.get("architectures") or [None]
    wanted = named[0] if isinstance(named, list) else named
    if wanted is not None and not isinstance(wanted, str):
        raise CheckpointError(f"{file} names the architecture {wanted!r}, which is no name")
    cls = getattr(transformers, wanted, None) if wanted else None
    known: Any = cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None
    if known is not None and not isinstance(config, known.config_class):
        raise CheckpointError(
            f"{file} is of the model type {settings['model_type']!r} and names the architecture {wanted}, which is of "
            "another"
        )
    with torch.device("meta"), _refused(file, "gives no model"), quiet():
        return known(config) if known is not None else transformers.AutoModel.from_config(config)


def _check_type(file: Path, settings: dict[str, Any]) -> None:
    transformers = load("transformers", "hf")
    kind = settings.get("model_type")
    if kind is None:
        raise CheckpointError(f"{file} names no model_type: it is no config of transformers")
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


def _harmless(value: Any) -> Any:
    """Copy settings, those of parts too, without the ones that choose an implementation."""
    if isinstance(value, dict):
        return {key: _harmless(item) for key, item in value.items() if not FETCHING.fullmatch(key)}
    return [_harmless(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _refused(file: Path, what: str) -> Iterator[None]:
    """Turn whatever a wrong setting makes transformers raise into a sentence that names the file."""
    try:
        yield
    except ImportError:
        # What is not installed is no fault of the file.
        raise
    except Exception as error:
        cause = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{file} {what} ({type(error).__name__}: {cause}): a setting is wrong or damaged"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing."""
    logging = load("transformers", "hf").logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
