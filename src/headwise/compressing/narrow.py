"""Linear layers that compute or read only some of their outer layer's channels; the others are 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NarrowRows(nn.Module):
    """A linear layer (..., in) to (..., out): `inner` computes the outputs listed in `rows`, the others are 0."""

    rows: Tensor

    def __init__(self, in_features: int, out_features: int, kept: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.inner = nn.Linear(in_features, kept, bias=bias)
        self.register_buffer("rows", torch.arange(kept))

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        outputs = self.inner(x)
        return outputs.new_zeros(*outputs.shape[:-1], self.out_features).index_copy(-1, self.rows, outputs)

    def extra_repr(self) -> str:
        """Return the outer sizes of the layer for its repr."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={len(self.rows)}"


class NarrowColumns(nn.Module):
    """A linear layer (..., in) to (..., out) that reads only the inputs listed in `columns`."""

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
        """Return the outer sizes of the layer for its repr."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={len(self.columns)}"


Narrow = NarrowRows | NarrowColumns


def narrow_like(kind: type[NarrowRows] | type[NarrowColumns], plain: nn.Module, kept: int) -> Narrow:
    """Return a narrow layer with uninitialized weights to replace a plain Linear or transformers' Conv1D."""
    weight = plain.weight
    assert isinstance(weight, Tensor)
    outputs, inputs = weight.shape if isinstance(plain, nn.Linear) else weight.shape[::-1]
    # On the meta device, because initial weights would be drawn from torch's generator and shift later random draws.
    with torch.device("meta"):
        layer = kind(inputs, outputs, kept, bias=getattr(plain, "bias", None) is not None)
    layer.to_empty(device=weight.device)
    layer.inner.to(dtype=weight.dtype).requires_grad_(weight.requires_grad)
    return layer.train(plain.training)
