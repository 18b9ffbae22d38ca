"""Narrow layers: linear layers that make, or take, fewer channels than their place in a model has; the others are 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NarrowRows(nn.Module):
    """A linear layer (..., in) to (..., out), most of whose outputs may be 0: `inner` makes those that `rows` names."""

    rows: Tensor

    def __init__(self, in_features: int, out_features: int, kept: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.inner = nn.Linear(in_features, kept, bias=bias)
        self.register_buffer("rows", torch.arange(kept))

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        made = self.inner(x)
        return made.new_zeros(*made.shape[:-1], self.out_features).index_copy(-1, self.rows, made)

    def extra_repr(self) -> str:
        """Show the place's own sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={len(self.rows)}"


class NarrowColumns(nn.Module):
    """A linear layer (..., in) to (..., out) that reads some of its inputs alone: those that `columns` names."""

    columns: Tensor

    def __init__(self, in_features: int, out_features: int, kept: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.inner = nn.Linear(kept, out_features, bias=bias)
        self.register_buffer("columns", torch.arange(kept))

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        return self.inner(x.index_select(-1, self.columns))

    def extra_repr(self) -> str:
        """Show the place's own sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={len(self.columns)}"


Narrow = NarrowRows | NarrowColumns


def narrow_like(kind: type[NarrowRows] | type[NarrowColumns], plain: nn.Module, kept: int) -> Narrow:
    """Make a narrow layer, its numbers not set yet, for the place of a plain one: a Linear, or transformers' Conv1D."""
    weight = plain.weight
    assert isinstance(weight, Tensor)
    outputs, inputs = weight.shape if isinstance(plain, nn.Linear) else weight.shape[::-1]
    # Made without numbers: initial ones would be drawn from torch's own generator, and so change what a training draws
    # next.
    with torch.device("meta"):
        made = kind(inputs, outputs, kept, bias=getattr(plain, "bias", None) is not None)
    made.to_empty(device=weight.device)
    made.inner.to(dtype=weight.dtype).requires_grad_(weight.requires_grad)
    return made.train(plain.training)
