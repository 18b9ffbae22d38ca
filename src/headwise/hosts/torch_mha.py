"""torch.nn.MultiheadAttention, alone and inside nn.TransformerEncoder and nn.TransformerDecoder."""

from __future__ import annotations

from torch import nn

from .host import Found


def find(model: nn.Module, taken: set[nn.Module]) -> list[Found]:
    """Find the nn.MultiheadAttention modules."""
    return []
