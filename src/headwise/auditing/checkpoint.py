"""The interface by which an audit reads any checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from headwise.auditing.batches import Batches
from headwise.borders import own_parameters
from headwise.core.site import Site
from headwise.files.errors import CheckpointError
from headwise.projections import Projections


class Checkpoint(Protocol):
    """A model on disk: its structure, its weights on demand, and batches in its format.

    `unused` lists tensors of its files that the model does not use, under the names they would have in the model.
    """

    name: str
    kind: str
    model: nn.Module
    unused: list[str]

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
    """Return a floating-point tensor that supports arithmetic; 8-bit floats become single precision.

    Raises:
        CheckpointError: if the tensor holds integers, whose scale is stored elsewhere.
    """
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{name} holds {tensor.dtype} instead of floating-point numbers: audit the model it was made from"
        )
    return tensor.float() if tensor.element_size() == 1 else tensor
