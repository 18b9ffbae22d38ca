"""Models of transformers from a folder that a stranger may have written: nothing in it chooses code.

transformers gets no path, only settings and tensors that were read here. In a folder it would also look for adapters,
for pickled checkpoints and for kernels to download.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.files.optional_imports import load

# Settings that make transformers download or run code, such as attn_implementation="someone/kernel", load weights of
# another file or with another library, or patch the model's classes.
CHOOSES_CODE = re.compile(
    r"_?(attn|experts)_implementation\w*|use_kernels|kernel_config|auto_map|custom_pipelines|trust_remote_code"
    r"|transformers_weights|fusion_config|quantization_config|compression_config|use_pretrained_backbone"
)


def harmless(value: Any) -> Any:
    """Return a copy of settings and nested settings without those that choose code."""
    if isinstance(value, dict):
        return {key: harmless(item) for key, item in value.items() if not CHOOSES_CODE.fullmatch(str(key))}
    return [harmless(item) for item in value] if isinstance(value, list | tuple) else value


def quantization_of(settings: Any) -> Any:
    """Return the settings of a quantization, of the whole model or of a part of it; None if there are none."""
    if isinstance(settings, list):
        return next((found for item in settings if (found := quantization_of(item))), None)
    if not isinstance(settings, dict):
        return None
    own = settings.get("quantization_config") or settings.get("compression_config")
    return own or next((found for item in settings.values() if (found := quantization_of(item))), None)


def config_of(settings: dict[str, Any]) -> Any:
    """Return the config of transformers from a folder's settings, without those that choose code."""
    auto = load("transformers", "hf").AutoConfig
    # from_pretrained alone repairs settings of earlier versions
    with tempfile.TemporaryDirectory() as clean:
        Path(clean, "config.json").write_text(json.dumps(harmless(settings)), encoding="utf-8")
        return auto.from_pretrained(clean, local_files_only=True, trust_remote_code=False)


def model_of(cls: Any, config: Any, tensors: dict[str, Tensor], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a new model of a class of transformers with these weights, in eval mode, and what did not fit.

    Args:
        cls: the class of the model.
        config: its config, made from settings that `harmless` returned.
        tensors: the weights, under the names of the files; transformers renames, splits and joins them.
        **options: of `from_pretrained`.

    Returns:
        The model, and transformers' record: missing_keys, unexpected_keys and mismatched_keys.
    """
    model, record = cls.from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, local_files_only=True, **options
    )
    return model.eval(), record
