"""Opening of a checkpoint: a folder, a file, a model in memory or one that a function builds."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend import Site, projections
from headwise.attend.projections import Projections
from headwise.files.arguments import is_a
from headwise.files.errors import CheckpointError, suggest
from headwise.files.optional_imports import load
from headwise.files.tensor_files import PICKLE_REMEDY, PICKLED, TensorFiles
from headwise.health.auditing.checkpoint import Batches, Checkpoint
from headwise.health.auditing.transformers_folder import TransformersFolder

# a model in memory, whose mode (training or eval) is not changed
LIVE = "live model"


class BuiltModel:
    """A model in memory with its weights."""

    def __init__(self, name: str, kind: str, model: nn.Module, image: dict[str, Any] | None = None) -> None:
        self.name, self.kind, self.model, self._image = name, kind, model if kind == LIVE else model.eval(), image
        # timm_model refuses weights that do not fit, and a factory loads its own.
        self.unused: list[str] = []
        self.remarks: list[str] = []

    def projections(self, site: Site) -> Projections:
        """Return a site's weights; if they are fused, their layout is verified on the site."""
        example = None
        if self._image is not None:
            example = torch.zeros(1, len(self._image["mean"]), *self._image["size"])
        return projections.find(site, self.model, example)

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Return parameters by their names."""
        state = self.model.state_dict()
        return {name: state[name] for name in names}

    def whole(self) -> nn.Module:
        """Return the model."""
        return self.model

    def batches(self) -> Batches:
        """Return the maker of batches from images; only timm models have one.

        Raises:
            CheckpointError: if the model is not of timm.
        """
        if self._image is None:
            raise CheckpointError(
                f"only the weights of a {self.kind} are audited: use headwise.watch to read it on your own batches"
            )
        return Batches(None, image=self._image)


def timm_model(name: str, file: Path) -> BuiltModel:
    """Return a timm model with the weights of a safetensors file, loaded strictly and tensor by tensor.

    The whole model is in memory, but never its whole file.

    Raises:
        CheckpointError: if the name is unknown, the file is pickled or damaged, or they do not fit.
    """
    timm = load("timm", "timm")
    if file.suffix in PICKLED:
        raise CheckpointError(f"{file} is pickled. {PICKLE_REMEDY}")
    names = timm.list_models()
    if name.split(".")[0] not in names:
        raise CheckpointError(f"timm {timm.__version__} has no model {name!r}.{suggest(name, names)}")
    files = TensorFiles.of_file(file)
    in_file = files.shapes()
    model = timm.create_model(name, pretrained=False, **_head(timm, name, in_file))
    state = model.state_dict()
    in_model = {key: tuple(value.shape) for key, value in state.items()}
    if in_model != in_file:
        key = next(k for k in [*in_model, *in_file] if in_model.get(k) != in_file.get(k))
        raise CheckpointError(
            f"{file} does not fit {name}: {key} is {in_file.get(key, 'missing')} in the file and "
            f"{in_model.get(key, 'absent')} in the model"
        )
    for key, value in state.items():
        value.copy_(files.read([key])[key])
    size = model.default_cfg
    image = {"size": tuple(size["input_size"][1:]), "mean": list(size["mean"]), "std": list(size["std"])}
    return BuiltModel(f"{name} ({file.name})", "timm model", model, image)


def _head(timm: Any, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the number of classes that the file was trained for, from the shape of its classifier."""
    settings = timm.get_pretrained_cfg(name)
    classifier = getattr(settings, "classifier", None) if settings is not None else None
    shape = shapes.get(f"{classifier}.weight") if isinstance(classifier, str) else None
    if shape is None and isinstance(classifier, str):
        return {"num_classes": 0}
    return {} if shape is None else {"num_classes": shape[0]}


def factory_model(file: Path, name: str) -> BuiltModel:
    """Return the model that the function `name` of a Python file builds, with its weights.

    Raises:
        CheckpointError: if the file or the name is missing, or the function returns no module.
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
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise CheckpointError(f"{file} has no function {name!r}.{suggest(name, names)}")
    model = factory()
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"{file}:{name} returned {type(model).__name__}, not a torch module")
    return BuiltModel(f"{file.name}:{name}", "factory", model)


# owner/model, the form of names on the hub; its oldest models, such as gpt2, have no owner
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
OLD_HUB_NAME = re.compile(r"\w[\w.-]*")
FORMS = "a transformers folder, TIMM_NAME:FILE.safetensors, or MODULE.py:FACTORY"


def open_checkpoint(text: str | Path | nn.Module) -> Checkpoint:
    """Return the opened checkpoint.

    Args:
        text: a model in memory; a transformers folder, such as `models/stories260K`, also in a hub's cache; the name of
            a model in that cache, such as `openai-community/gpt2`; a timm name and its weights, such as
            `vit_tiny_patch16_224:weights.safetensors`; or your own function that returns a model, such as
            `model.py:build`.

    Raises:
        CheckpointError: if it cannot be opened; the message has the cause and the remedy.
    """
    if isinstance(text, nn.Module):
        if next(text.parameters(), None) is None:
            raise CheckpointError(f"{type(text).__name__} has no parameters: there is nothing to read")
        return BuiltModel(type(text).__name__, LIVE, text)
    is_a("checkpoint", text, (str, Path), f"a torch module, {FORMS}")
    path = Path(text)
    if path.is_dir():
        return TransformersFolder(snapshot_of(path))
    left, colon, right = str(text).rpartition(":")
    if colon and left.endswith(".py"):
        return factory_model(Path(left), right)
    if colon and left and not path.exists():
        return timm_model(left, Path(right))
    if path.suffix in PICKLED and path.is_file():
        raise CheckpointError(f"{path} is pickled. {PICKLE_REMEDY}")
    if path.is_file():
        raise CheckpointError(f"{path} alone does not show which model it is: give {FORMS}")
    if HUB_NAME.fullmatch(str(text)):
        return TransformersFolder(_of_hub(str(text)))
    if OLD_HUB_NAME.fullmatch(str(text)):
        try:
            return TransformersFolder(_of_hub(str(text)))
        except CheckpointError as error:
            remedy = f"give {FORMS}; for a model of the hub, run hf download {text}, then give the same name again"
            raise CheckpointError(f"there is no checkpoint {str(text)!r}: {remedy}") from error
    raise CheckpointError(f"there is no checkpoint {str(text)!r}: give {FORMS}")


def snapshot_of(path: Path) -> Path:
    """Return the folder of a model's files: in a hub's cache, the snapshot of its main branch, or the only snapshot.

    Raises:
        CheckpointError: if a cache has no snapshot, or several and no main branch.
    """
    snapshots = path / "snapshots"
    if (path / "config.json").is_file() or not snapshots.is_dir():
        return path
    branch = path / "refs" / "main"
    if branch.is_file() and (main := snapshots / branch.read_text(encoding="utf-8").strip()).is_dir():
        return main
    folders = sorted(folder for folder in snapshots.iterdir() if folder.is_dir())
    if len(folders) == 1:
        return folders[0]
    listed = ", ".join(folder.name[:12] for folder in folders) or "none"
    raise CheckpointError(
        f"{path} is a hub's cache and names no main snapshot; it holds {listed}. Give one of {snapshots}/..."
    )


def _of_hub(name: str) -> Path:
    """Return the folder of a model of the hub in the local cache; nothing is downloaded."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{name!r} names a model of the hub: pip install 'headwise[hf]', then hf download {name}"
        ) from error
    folder = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if not folder.is_dir():
        raise CheckpointError(
            f"{name!r} is not a folder here, and {HF_HUB_CACHE} has no model of this name. Nothing is downloaded "
            f"automatically: run hf download {name}, then give the same name again"
        )
    return snapshot_of(folder)
