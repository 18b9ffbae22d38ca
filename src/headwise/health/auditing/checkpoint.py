"""What an audit reads of any checkpoint: its model, weights on demand, and batches that the model accepts.

The files themselves are read by `files/tensor_files.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.attend import Site
from headwise.attend.projections import Projections
from headwise.borders import own_parameters
from headwise.files.errors import CheckpointError
from headwise.files.optional_imports import load
from headwise.files.tensor_files import read_object

SEQUENCES, LENGTH, IMAGES = 8, 256, 16
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
Batch = dict[str, Tensor] | Tensor


class Batches:
    """A maker of batches for one model, with the tokenizer of its folder and the image size of its config.

    Args:
        first: the number of the first token's position.
    """

    def __init__(
        self, folder: Path | None, config: Any = None, image: dict[str, Any] | None = None, first: int = 0
    ) -> None:
        self.folder, self.config, self.image, self.first = folder, config, image, first

    @property
    def joint(self) -> bool:
        """Return whether the model has a part for texts and one for images."""
        return all(getattr(self.config, f"{part}_config", None) is not None for part in ("text", "vision"))

    def of(self, text: Path | None, images: Path | None) -> list[Batch]:
        """Return the batches of a text file, a folder of images, or both, merged if the model takes them together.

        Raises:
            CheckpointError: if the model accepts no such data, or there is nothing to read.
        """
        texts = self.text(text) if text is not None else []
        pictures = self.images(images) if images is not None else []
        if not (self.joint and texts and pictures):
            return texts + pictures
        return [{**words, **pixels} for words, pixels in zip(texts, pictures, strict=True)]  # type: ignore[dict-item]

    def text(self, path: Path) -> list[Batch]:
        """Return a text as one batch of at most 8 sequences of at most 256 tokens, all of the same length.

        Raises:
            CheckpointError: if the model takes no text or its folder has no tokenizer.
        """
        part = self.config
        if getattr(part, "vocab_size", None) is None:
            part = getattr(self.config, "text_config", None)
        if getattr(part, "vocab_size", None) is None:
            raise CheckpointError("this model takes no text: pass images=")
        if not path.is_file():
            raise CheckpointError(f"there is no text file {path}")
        try:
            auto = load("transformers", "hf").AutoTokenizer
            tokenizer = auto.from_pretrained(str(self.folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.folder} has no tokenizer that transformers can load without running its code "
                f"({str(error).splitlines()[0]})"
            ) from None
        ids = tokenizer(path.read_text(encoding="utf-8"), truncation=False, verbose=False)["input_ids"]
        positions = getattr(part, "max_position_embeddings", None)
        limit = min(LENGTH, positions - self.first if positions else LENGTH)
        length = min(limit, len(ids))
        if length < 2:
            raise CheckpointError(f"{path} holds {len(ids)} tokens, and at least 2 are needed: give a longer text")
        rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)][:SEQUENCES]
        batch = {"input_ids": torch.tensor(rows)}
        if getattr(self.config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = batch["input_ids"]
        return [batch]

    def images(self, folder: Path) -> list[Batch]:
        """Return the first 16 images of a folder as one batch, resized and normalised for the model.

        Raises:
            CheckpointError: if the model takes no images or the folder has none.
        """
        settings = self.image or self._image_settings()
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {folder}")
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)[:IMAGES]
        if not files:
            raise CheckpointError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
        mean, std = (torch.tensor(settings[key], dtype=torch.float32).view(-1, 1, 1) for key in ("mean", "std"))
        pixels = torch.stack([(_pixels(path, settings["size"], len(mean)) - mean) / std for path in files])
        return [{"pixel_values": pixels} if self.config is not None else pixels]

    def _image_settings(self) -> dict[str, Any]:
        part = getattr(self.config, "vision_config", None) or self.config
        size = getattr(part, "image_size", None)
        if size is None:
            raise CheckpointError("this model takes no images: pass text=")
        file = self.folder / "preprocessor_config.json" if self.folder else None
        settings = read_object(file) if file is not None and file.is_file() else {}
        channels = getattr(part, "num_channels", 3)
        half = [0.5] * channels
        return {
            "size": tuple(size) if isinstance(size, list | tuple) else (size, size),
            "mean": settings.get("image_mean", half),
            "std": settings.get("image_std", half),
        }


def _pixels(path: Path, size: tuple[int, int], channels: int) -> Tensor:
    numpy, pillow = load("numpy", "study"), load("PIL.Image", "timm")
    try:
        image = pillow.open(path).convert("RGB" if channels == 3 else "L").resize(size[::-1], pillow.Resampling.BICUBIC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as an image ({error}): repair or remove it") from None
    pixels = torch.from_numpy(numpy.asarray(image).copy()).float() / 255
    return pixels.permute(2, 0, 1) if channels == 3 else pixels.unsqueeze(0)


class Checkpoint(Protocol):
    """A model on disk: its structure, its weights on demand, and batches in its format.

    `unused` lists tensors of its files that the model does not use, under the names they would have in the model;
    `remarks` what a reader must know of the files.
    """

    name: str
    kind: str
    model: nn.Module
    unused: list[str]
    remarks: list[str]

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Return parameters by their names in the model."""
        ...

    def projections(self, site: Site) -> Projections:
        """Return a site's weights in `model`."""
        ...

    def whole(self) -> nn.Module:
        """Return the model with all its weights, in eval mode."""
        ...

    def batches(self) -> Batches:
        """Return the maker of batches from texts and images."""
        ...


@contextmanager
def weights_in_place(checkpoint: Checkpoint, layout: Projections) -> Iterator[None]:
    """Put the real weights of one site into the structure inside the context, and remove them afterwards."""
    places: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
    for block in layout.blocks:
        if (parameter := own_parameters(block.module).get(block.name)) is not None and parameter.device.type == "meta":
            places.setdefault(block.where, (block.module, block.name, parameter))
    read = checkpoint.tensors(list(places)) if places else {}
    try:
        for full_name, (module, name, empty) in places.items():
            if read[full_name].shape != empty.shape:
                raise CheckpointError(unfitting(full_name, tuple(read[full_name].shape), empty))
            own_parameters(module)[name] = nn.Parameter(_as_float(read[full_name], full_name), requires_grad=False)
        yield
    finally:
        for module, name, empty in places.values():
            own_parameters(module)[name] = empty


def unfitting(name: str, shape: tuple[int, ...], claimed: Tensor) -> str:
    """Return the message that a tensor has another shape than the config claims."""
    shapes = f"{shape} in the checkpoint and {tuple(claimed.shape)} by its config"
    return f"{name} has the shape {shapes}: weights and config do not belong together"


def _as_float(tensor: Tensor, name: str) -> Tensor:
    """Return a floating-point tensor that supports arithmetic; 8-bit floats become single precision."""
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{name} holds {tensor.dtype} instead of floating-point numbers: audit the model it was made from"
        )
    return tensor.float() if tensor.element_size() == 1 else tensor
