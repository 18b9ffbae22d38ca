"""Products of vectors with the Hessian of a loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

TWICE = (
    "the loss cannot be differentiated twice ({why}): fused kernels and compiled graphs have no second derivative; "
    "compute it with plain operations, for example by the model before torch.compile, without its activation "
    "checkpointing"
)


class Hessian:
    """The Hessian of a loss as a linear map of vectors, with one backward pass per product (Pearlmutter 1994).

    Args:
        loss: a 0-d tensor whose graph has not been freed.
        parameters: the parameters, in their order in a vector (P,).

    Raises:
        ValueError: if the loss is not a 0-d tensor with a graph, or an operation has no second derivative.
    """

    def __init__(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        if not isinstance(loss, Tensor):
            raise ValueError(f"sharpness needs a loss that is a 0-d tensor with a graph, got a {type(loss).__name__}")
        if loss.dim() or not loss.requires_grad:
            raise ValueError(
                f"sharpness needs a loss that is a 0-d tensor with a graph, got the shape {tuple(loss.shape)}"
                + ("" if loss.requires_grad else " without a graph: compute it with gradients on")
            )
        self.parameters = list(parameters)
        self.size = sum(p.numel() for p in self.parameters)
        gradients = self._differentiate(loss, again=True)
        # Parameters that the loss is linear in or does not depend on have no second derivative.
        self._curved = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]

    def product(self, vector: Tensor) -> Tensor:
        """Return H·v for a vector (P,) in the parameters' order."""
        parts = self.split(vector)
        if not self._curved:
            return torch.zeros_like(vector)
        along = torch.stack([(gradient * parts[i].to(gradient)).sum() for i, gradient in self._curved]).sum()
        return flat(self._differentiate(along), self.parameters, vector)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector (P,), one in the shape of each parameter."""
        parts = vector.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def _differentiate(self, value: Tensor, again: bool = False) -> tuple[Tensor | None, ...]:
        try:
            return torch.autograd.grad(value, self.parameters, create_graph=again, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise ValueError(TWICE.format(why=str(error).splitlines()[0])) from error


def flat(parts: Iterable[Tensor | None], parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the vector (P,) of one tensor per parameter, where None means zeros."""
    pairs = zip(parts, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if part is None else part).flatten().to(like) for part, p in pairs])
