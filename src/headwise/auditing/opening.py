"""Opening what is audited: a folder, a file, a model that a function builds."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise import projections
from headwise.auditing.batches import Batches
from headwise.auditing.checkpoint import Checkpoint
from headwise.auditing.tensor_files import PICKLE_REMEDY, PICKLED, TensorFiles
from headwise.auditing.transformers_folder import TransformersFolder
from headwise.core.settings import suggest
from headwise.core.site import Site
from headwise.files.errors import CheckpointError
from headwise.files.optional_imports import load
from headwise.projections import Projections

# a model that its owner trains: it stays in the mode that it is in
LIVE = "live model"


class BuiltModel:
    """A model that stands in memory with its weights."""

    def __init__(self, name: str, kind: str, model: nn.Module, image: dict[str, Any] | None = None) -> None:
        self.name, self.kind, self.model, self._image = name, kind, model if kind == LIVE else model.eval(), image
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
                f"a {self.kind} is audited by its weights: headwise.watch reads it on your own batches"
            )
        return Batches(None, image=self._image)


def timm_model(name: str, file: Path) -> BuiltModel:
    """Build a timm model by name and load a safetensors file into it, strictly and tensor by tensor.

    The model stands in memory whole, its file does not.

    Raises:
        CheckpointError: if the name is unknown, the file is pickled or damaged, or they do not fit.
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
            f"{file} does not fit {name}: {key} is {ours.get(key, 'missing')} in the file and "
            f"{theirs.get(key, 'absent')} in the model"
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
        CheckpointError: if the file or the name is missing, or it gives no module.
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


# owner and model, as the hub names them; its oldest models, such as gpt2, are named without an owner
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
OLD_HUB_NAME = re.compile(r"\w[\w.-]*")
FORMS = "a transformers folder, TIMM_NAME:FILE.safetensors, or MODULE.py:FACTORY"


def open_checkpoint(text: str | Path | nn.Module) -> Checkpoint:
    """Open a checkpoint.

    Args:
        text: a model in memory; a transformers folder, such as `models/stories260K`, or that of a hub's cache; the name
            of a model that lies in the cache, such as `openai-community/gpt2`; a timm name and its weights, such as
            `vit_tiny_patch16_224:weights.safetensors`; or a function of yours that gives a model, such as
            `model.py:build`.

    Raises:
        CheckpointError: naming what is wrong and what to do.
    """
    if isinstance(text, nn.Module):
        if next(text.parameters(), None) is None:
            raise CheckpointError(f"{type(text).__name__} has no parameters: there is nothing to read")
        return BuiltModel(type(text).__name__, LIVE, text)
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
        raise CheckpointError(f"{path} alone does not tell which model it is: give {FORMS}")
    if HUB_NAME.fullmatch(str(text)):
        return TransformersFolder(_of_hub(str(text)))
    if OLD_HUB_NAME.fullmatch(str(text)):
        try:
            return TransformersFolder(_of_hub(str(text)))
        except CheckpointError as error:
            remedy = f"give {FORMS}; of a model of the hub, hf download {text}, then give the same name again"
            raise CheckpointError(f"there is no checkpoint {str(text)!r}: {remedy}") from error
    raise CheckpointError(f"there is no checkpoint {str(text)!r}: give {FORMS}")


def snapshot_of(path: Path) -> Path:
    """Return the folder that holds a model's files: of a hub's cache, the snapshot that its main branch names, else the
    latest.

    Raises:
        CheckpointError: if a cache holds no snapshot, or several and names none.
    """
    snapshots = path / "snapshots"
    if (path / "config.json").is_file() or not snapshots.is_dir():
        return path
    named = path / "refs" / "main"
    if named.is_file() and (found := snapshots / named.read_text(encoding="utf-8").strip()).is_dir():
        return found
    found_all = sorted(one for one in snapshots.iterdir() if one.is_dir())
    if len(found_all) == 1:
        return found_all[0]
    listed = ", ".join(one.name[:12] for one in found_all) or "none"
    raise CheckpointError(
        f"{path} is a hub's cache and names no main snapshot; it holds {listed}. Give one of {snapshots}/..."
    )


def _of_hub(name: str) -> Path:
    """Return the folder of the cache in which a model of the hub lies; nothing is downloaded.

    Raises:
        CheckpointError: with the command that downloads it, where it does not lie there.
    """
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{name!r} names a model of the hub: pip install 'headwise[hf]', then hf download {name}"
        ) from error
    folder = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if not folder.is_dir():
        raise CheckpointError(
            f"{name!r} is no folder here, and no model of this name lies in {HF_HUB_CACHE}. Nothing is downloaded by "
            f"itself: hf download {name}, then give the same name again"
        )
    return snapshot_of(folder)
