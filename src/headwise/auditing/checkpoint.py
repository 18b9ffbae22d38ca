"""Checkpoint: what an audit asks of a model on disk, wherever it came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from headwise.auditing.batches import Batches
from headwise.core.site import Site
from headwise.files.errors import CheckpointError
from headwise.projections import Projections


class Checkpoint(Protocol):
    """A model on disk: its structure, its weights on demand, and batches it understands.

    `unused` names tensors of its files that the model has no place for, as the model would name them.
    """

    name: str
    kind: str
    model: nn.Module
    unused: list[str]

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Read parameters by their names in the model."""
        ...

    def projections(self, site: Site) -> Projections:
        """Find a site's weights in `model`."""
        ...

    def whole(self) -> nn.Module:
        """Return the model with all its weights, in eval mode."""
        ...

    def batches(self) -> Batches:
        """Return what turns texts and images into batches."""
        ...


@contextmanager
def weights_in_place(checkpoint: Checkpoint, found: Projections) -> Iterator[None]:
    """Put the real weights of one site into the structure, and take them out again."""
    places: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
    for block in found.blocks:
        if (parameter := block.module._parameters.get(block.name)) is not None and parameter.device.type == "meta":
            places.setdefault(block.where, (block.module, block.name, parameter))
    read = checkpoint.tensors(list(places)) if places else {}
    try:
        for where, (module, name, empty) in places.items():
            if read[where].shape != empty.shape:
                raise CheckpointError(unfitting(where, tuple(read[where].shape), empty))
            module._parameters[name] = nn.Parameter(_numbers(read[where], where), requires_grad=False)
        yield
    finally:
        for module, name, empty in places.values():
            module._parameters[name] = empty


def unfitting(where: str, kept: tuple[int, ...], claimed: Tensor) -> str:
    """Say that a tensor has another shape than the config claims."""
    shapes = f"{kept} in the checkpoint and {tuple(claimed.shape)} by its config"
    return f"{where} has the shape {shapes}: weights and config do not belong together"


def _numbers(tensor: Tensor, where: str) -> Tensor:
    """Return numbers that can be computed with; of 8 bits they only have the values.

    Raises:
        CheckpointError: if they are integers, whose scale stands elsewhere.
    """
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{where} holds {tensor.dtype} and no floating-point numbers: audit the model it was made from"
        )
    return tensor.float() if tensor.element_size() == 1 else tensor
