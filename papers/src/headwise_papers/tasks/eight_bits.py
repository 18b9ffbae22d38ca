"""Simulation of 8-bit weights: within a context a model computes with rounded weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

ROUNDED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight (rows, …) with each row rounded to integers of at most 127 times the row's scale."""
    rows = weight.flatten(1)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return ((rows / scale).round() * scale).view_as(weight)


@contextmanager
def in_8_bits(model: nn.Module) -> Iterator[None]:
    """Round the weights of linear layers, convolutions, embeddings and torch's attention within the context.

    Of a reparametrized weight, the computed value is rounded. All weights are restored at the end.
    """
    done: set[int] = set()
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, ROUNDED):
                continue
            for name, weight in module.named_parameters(recurse=False):
                # a tied weight is rounded once
                if weight.ndim > 1 and name.endswith("weight") and id(weight) not in done:
                    done.add(id(weight))
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
