"""Shared values: the values of a stack's first self attention, for the layers above it."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.call import Call
from headwise.core.forward import Forward


def share(forward: Forward, call: Call) -> None:
    """Keep the values of a stack's first self attention for the layers above.

    Raises:
        RuntimeError: where that layer computes attention twice in one forward.
    """
    if call.open_pass().again is True:
        return
    now = forward.now()
    if now.running and call.site.stack in now.carried:
        raise RuntimeError(
            f"{call.site.name} computes attention more than once in a forward (for each image, or for parts of its "
            "values), so that the layers above it could get values of other tokens: methods that carry values do not "
            "work on this model"
        )
    now.carried[call.site.stack] = call.v
    if not now.running:
        now.given.clear()


def first_values(forward: Forward, call: Call) -> Tensor | None:
    """Return the values of the first self attention of the call's stack in this forward, (B, H, N, D); None on that
    site itself.

    Raises:
        RuntimeError: where that site did not run in this forward, or has other tokens or heads.
    """
    stack, this = call.site.stack, call.open_pass()
    if call.layer.shares_values:
        return None
    if this.again is True and this.region is not None:
        for inner in this.first_runs:
            inner.carried[stack] = this.region.carried[stack]
        return this.region.carried[stack]
    now = forward.now()
    values = now.carried.get(stack)
    if not now.running and not torch.compiler.is_compiling():
        # Layers that are called one by one get the values once: a second time they are those of an earlier input.
        values = None if call.site.index in now.given else values
        now.given.add(call.site.index)
    if values is None:
        raise RuntimeError(
            f"{call.site.name} needs the values of the first self attention of {stack or 'the model'}, which did not "
            "run in this forward; call the whole model, or the layers in their order"
        )
    _same_tokens(call, values)
    # A recompute must not reach into the graph of the first run: it gets the values cut off from it.
    for region in this.first_runs:
        region.carried[stack] = values.detach().requires_grad_(values.requires_grad)
    return values


def _same_tokens(call: Call, values: Tensor) -> None:
    cached = call.queries < call.keys
    same = values.shape[:2] == call.v.shape[:2] and values.shape[3] == call.v.shape[3]
    # With a cache only the new tokens' own values are compared, and sliding layers keep fewer of the old ones.
    if not same or (values.shape[2] != call.v.shape[2] and not cached):
        raise RuntimeError(
            f"{call.site.name} has values of shape {tuple(call.v.shape)} but the first self attention of its stack has "
            f"{tuple(values.shape)}: tokens cannot be carried between layers of different token counts or heads. "
            "Choose layers of one resolution with where="
        )
