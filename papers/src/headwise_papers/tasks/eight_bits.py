"""What weights of 8 bits would change: a model computes for a moment with rounded ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

ROUNDED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight (rows, …) whose rows are whole multiples, up to 127, of a scale of their own."""
    rows = weight.flatten(1)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return ((rows / scale).round() * scale).view_as(weight)


@contextmanager
def in_8_bits(model: nn.Module) -> Iterator[None]:
    """Let linear layers, convolutions, embeddings and torch's attention compute with rounded weights, reparametrized
    ones with what they compute; afterwards all are as they were."""
    seen: set[int] = set()
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, ROUNDED):
                continue
            for name, weight in module.named_parameters(recurse=False):
                # a tied weight is rounded once
                if weight.ndim > 1 and name.endswith("weight") and id(weight) not in seen:
                    seen.add(id(weight))
                    stack.callback(weight.copy_, weight.clone())
                    weight.copy_(rounded(weight))
            if parametrize.is_parametrized(module):
                for name, steps in module.parametrizations.items():  # type: ignore[union-attr, operator]
                    if name.endswith("weight"):
                        stack.callback(steps.pop, len(steps))
                        steps.append(_Rounding())
        yield


class _Rounding(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return rounded(weight)
