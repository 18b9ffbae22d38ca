"""Opening: what a checkpoint's text names."""

from __future__ import annotations

from pathlib import Path

from headwise.auditing.built_model import factory_model, timm_model
from headwise.auditing.checkpoint import Checkpoint
from headwise.auditing.errors import CheckpointError
from headwise.auditing.tensor_files import PICKLE_REMEDY, PICKLED
from headwise.auditing.transformers_folder import TransformersFolder

FORMS = "a transformers folder, TIMM_NAME:FILE.safetensors, or MODULE.py:FACTORY"


def open_checkpoint(text: str | Path) -> Checkpoint:
    """Open a checkpoint.

    Args:
        text: a transformers folder, such as `models/stories260K`; a timm name and its weights, such as
            `vit_tiny_patch16_224:weights.safetensors`; or a function of yours that gives a model, such as `model.py:build`.

    Raises:
        CheckpointError: naming what is wrong and what to do.
    """
    path = Path(text)
    if path.is_dir():
        return TransformersFolder(path)
    left, colon, right = str(text).rpartition(":")
    if colon and left.endswith(".py"):
        return factory_model(Path(left), right)
    if colon and left and not path.exists():
        return timm_model(left, Path(right))
    if path.suffix in PICKLED and path.is_file():
        raise CheckpointError(f"{path} is pickled. {PICKLE_REMEDY}")
    if path.is_file():
        raise CheckpointError(f"{path} alone does not tell which model it is: give {FORMS}")
    raise CheckpointError(f"there is no checkpoint {str(text)!r}: give {FORMS}")
