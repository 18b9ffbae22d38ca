"""Pass keys: which pass through a site this is, and so which draws it makes.

A pass in the recompute of a checkpointed region gets the key of the pass that it repeats, and says so: its draws are those of
the first time, and its penalties do not count again.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headwise.core import recompute
from headwise.core.live_sites import numbered
from headwise.core.random_draws import mix
from headwise.core.recompute import Pass
from headwise.core.site import Site

# Braces are doubled: texts that hold it are formatted.
NOT_REENTRANT = (
    "Use checkpoint(..., use_reentrant=False), or in transformers {{'use_reentrant': False}} as activation_checkpointing_kwargs "
    "(gradient_checkpointing_kwargs before that name)"
)
REENTRANT = (
    "{site} was run again inside a backward pass, as reentrant activation checkpointing does; {method} would draw, "
    "penalise or carry values a second time and its gradient would be silently wrong. "
    f"{NOT_REENTRANT}."
)
UNDIFFERENTIATED = (
    "{sites} ran without gradients inside a training forward, as under reentrant activation checkpointing, which runs them again in "
    "the backward: {methods} would draw, penalise or carry values a second time. "
    f"{NOT_REENTRANT}. Layers that the model itself runs under torch.no_grad() are left "
    "out with where="
)
COMPILED = (
    "{site} was recomputed inside a compiled graph's backward: activation checkpointing inside torch.compile would draw "
    "again for {method}. Compile the layer and checkpoint around it: checkpoint(torch.compile(layer), x, use_reentrant=False)."
)


class Passing(Protocol):
    """What is asked of a fitted site to open a pass through it."""

    counter: Tensor
    number: int

    @property
    def site(self) -> Site:
        """Give the site."""
        ...

    def seed(self) -> int:
        """Give the seed of this process's draws."""
        ...

    def stateful(self) -> str:
        """Name the methods for which a repeated pass matters."""
        ...


def begin(fitted: Passing) -> Pass:
    """Open a pass through a site: count it, or find the pass that it repeats."""
    if torch.compiler.is_compiling():
        # A graph can neither ask what is recomputed nor read the counter as a number: the operator does, each time it runs.
        token = compiled_token(fitted.counter, fitted.number)
        return Pass(token[0], token[1])
    return _begin(fitted)


def _begin(fitted: Passing) -> Pass:
    first, repeated, rerun = recompute.regions()
    if repeated is not None:
        at = repeated.replay.setdefault(rerun, {})
        # A layer may run several times in one region: the n-th repeat is of the n-th run.
        nth = at.get(fitted.number, 0)
        at[fitted.number] = nth + 1
        known = repeated.keys.get(fitted.number, [])
        if nth < len(known):
            _remember(first, fitted, known[nth])
            return Pass(known[nth], True, repeated, first)
    if recompute.in_backward():
        raise RuntimeError(REENTRANT.format(site=fitted.site.name, method=fitted.stateful()))
    key = mix(fitted.seed(), fitted.site.index, int(fitted.counter))
    fitted.counter.add_(1)
    _remember(first, fitted, key)
    return Pass(key, False, first[-1] if first else None, first)


def _remember(first: list[recompute.Region], fitted: Passing, key: int) -> None:
    for region in first:
        region.keys.setdefault(fitted.number, []).append(key)


@torch.library.custom_op("headwise::token", mutates_args={"counter"})
def compiled_token(counter: Tensor, number: int) -> Tensor:
    """Give (key, again) of a pass when a compiled graph runs; the graph itself holds no state."""
    # By number: a graph that held the site would keep its model alive, and could not serve a copy of it.
    fitted = numbered(number)
    first, repeated, _ = recompute.regions()
    if recompute.in_backward() and repeated is None:
        raise RuntimeError(COMPILED.format(site=fitted.site.name, method=fitted.stateful()))
    if repeated is not None:
        made = _begin(fitted)
        return torch.tensor([made.key, int(made.again)], dtype=torch.int64)
    key = mix(fitted.seed(), fitted.site.index, int(counter))
    counter.add_(1)
    _remember(first, fitted, key)
    return torch.tensor([key, 0], dtype=torch.int64)


@compiled_token.register_fake
def _(counter: Tensor, number: int) -> Tensor:
    return torch.empty(2, dtype=torch.int64)
