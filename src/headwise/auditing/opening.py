"""Opening what is audited: a folder, a file, a model that a function builds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise import projections
from headwise.auditing.batches import Batches
from headwise.auditing.checkpoint import Checkpoint
from headwise.auditing.errors import CheckpointError
from headwise.auditing.tensor_files import PICKLE_REMEDY, PICKLED, TensorFiles
from headwise.auditing.transformers_folder import TransformersFolder
from headwise.core.settings import suggest
from headwise.core.site import Site
from headwise.files.optional_imports import load
from headwise.projections import Projections


class BuiltModel:
    """A model that stands in memory with its weights."""

    def __init__(self, name: str, kind: str, model: nn.Module, image: dict[str, Any] | None = None) -> None:
        self.name, self.kind, self.model, self._image = name, kind, model.eval(), image
        # Weights that do not fit are refused, or the factory's own affair.
        self.unused: list[str] = []

    def projections(self, site: Site) -> Projections:
        """Find a site's weights, verified on the site where they are fused."""
        example = None
        if self._image is not None:
            example = torch.zeros(1, len(self._image["mean"]), *self._image["size"])
        return projections.find(site, self.model, example)

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Read parameters by their names."""
        state = self.model.state_dict()
        return {name: state[name] for name in names}

    def whole(self) -> nn.Module:
        """Return the model."""
        return self.model

    def batches(self) -> Batches:
        """Return what turns images into batches; a factory's model is read from its weights alone."""
        if self._image is None:
            raise CheckpointError(
                "the model of a factory is audited by its weights: headwise.watch reads it on your own batches"
            )
        return Batches(None, image=self._image)


def timm_model(name: str, file: Path) -> BuiltModel:
    """Build a timm model by name and load a safetensors file into it, strictly and tensor by tensor.

    The model stands in memory whole, its file does not.

    Raises:
        CheckpointError: where the name is unknown, the file is pickled or damaged, or they do not fit.
    """
    timm = load("timm", "timm")
    if file.suffix in PICKLED:
        raise CheckpointError(f"{file} is pickled. {PICKLE_REMEDY}")
    known = timm.list_models()
    if name.split(".")[0] not in known:
        raise CheckpointError(f"timm {timm.__version__} has no model {name!r}.{suggest(name, known)}")
    files = TensorFiles.of_file(file)
    ours = files.shapes()
    model = timm.create_model(name, pretrained=False, **_head(timm, name, ours))
    state = model.state_dict()
    theirs = {key: tuple(value.shape) for key, value in state.items()}
    if theirs != ours:
        key = next(k for k in [*theirs, *ours] if theirs.get(k) != ours.get(k))
        raise CheckpointError(
            f"{file} does not fit {name}: {key} is {ours.get(key, 'missing')} in the file and {theirs.get(key, 'absent')} in the model"
        )
    for key, value in state.items():
        value.copy_(files.read([key])[key])
    size = model.default_cfg
    image = {"size": tuple(size["input_size"][1:]), "mean": list(size["mean"]), "std": list(size["std"])}
    return BuiltModel(f"{name} ({file.name})", "timm model", model, image)


def _head(timm: Any, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the number of classes the file was trained for, where its classifier tells."""
    settings = timm.get_pretrained_cfg(name)
    classifier = getattr(settings, "classifier", None) if settings is not None else None
    shape = shapes.get(f"{classifier}.weight") if isinstance(classifier, str) else None
    if shape is None and isinstance(classifier, str):
        return {"num_classes": 0}
    return {} if shape is None else {"num_classes": shape[0]}


def factory_model(file: Path, name: str) -> BuiltModel:
    """Call `name` of a Python file of yours; it gives the model with its weights.

    Raises:
        CheckpointError: where the file or the name is missing, or it gives no module.
    """
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"headwise_audited_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise CheckpointError(f"{file} has no function {name!r}.{suggest(name, known)}")
    model = factory()
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"{file}:{name} gave {type(model).__name__}, not a torch module")
    return BuiltModel(f"{file.name}:{name}", "factory", model)


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
