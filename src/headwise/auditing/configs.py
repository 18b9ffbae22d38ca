"""Configs: a folder's config.json as a config of transformers and a structure without weights, with nothing in it that fetches code."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.auditing.errors import CheckpointError
from headwise.files.optional_imports import load

# A name such as "kernels-community/..." in one of these makes transformers fetch a kernel and run it.
FETCHING = re.compile(r"_?(attn|experts)_implementation\w*|use_kernels|auto_map")


def config_of(folder: Path, settings: dict[str, Any]) -> Any:
    """Make the config of a folder from its settings; which attention computes is left to transformers itself.

    Raises:
        CheckpointError: where the type is unknown, the weights are quantized or a setting is no such setting.
    """
    transformers, file = load("transformers", "hf"), folder / "config.json"
    _check_type(file, settings)
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
        raise CheckpointError(
            f"{folder} is quantized ({method}); its integers are no weights to take spectra of. Audit the model it was made from"
        )
    with tempfile.TemporaryDirectory() as place, _refused(file, "cannot be read as a config"), quiet():
        (Path(place) / "config.json").write_text(json.dumps(_harmless(settings)), encoding="utf-8")
        return transformers.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)


def structure_of(folder: Path, config: Any, settings: dict[str, Any]) -> nn.Module:
    """Build the model of a config on no device.

    Raises:
        CheckpointError: where no model can be built from it.
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
            f"{file} is of the model type {settings['model_type']!r} and names the architecture {wanted}, which is of another"
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
            f"the model type {kind!r} of {file.parent} lives in code of the checkpoint, which headwise never runs. Load the model "
            "yourself and pass it as module.py:factory"
        )
    raise CheckpointError(
        f"transformers {transformers.__version__} knows no model type {kind!r} ({file}): update transformers, or pass module.py:factory"
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
