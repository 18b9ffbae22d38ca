"""Passes: which pass through a layer this is, and so which draws it makes.

A pass in the recompute of a checkpointed region gets the key of the pass that it repeats, and says so: its draws are
those of the first time, and its penalties do not count again.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from headwise.core import recompute
from headwise.core.method import Method
from headwise.core.random_draws import mix
from headwise.core.recompute import Pass
from headwise.core.site import Site

# Braces are doubled: texts that hold it are formatted.
NOT_REENTRANT = (
    "Use checkpoint(..., use_reentrant=False), or in transformers {{'use_reentrant': False}} as "
    "activation_checkpointing_kwargs (gradient_checkpointing_kwargs before that name)"
)
REENTRANT = (
    "{site} was run again inside a backward pass, as reentrant activation checkpointing does; {method} would draw, "
    f"penalise or carry values a second time and its gradient would be silently wrong. {NOT_REENTRANT}."
)
UNDIFFERENTIATED = (
    "{sites} ran without gradients inside a training forward, as under reentrant activation checkpointing, which runs "
    f"them again in the backward: {{methods}} would draw, penalise or carry values a second time. {NOT_REENTRANT}. "
    "Layers that the model itself runs under torch.no_grad() are left out with where="
)
COMPILED = (
    "{site} was recomputed inside a compiled graph's backward: activation checkpointing inside torch.compile would "
    "draw again for {method}. Compile the layer and checkpoint around it: checkpoint(torch.compile(layer), x, "
    "use_reentrant=False)."
)


# Compiled graphs hold a number and never the layer, which a graph would keep alive. A number is never given twice.
_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, Passes] = weakref.WeakValueDictionary()


class Passes:
    """Counts the passes through one layer.

    Attributes:
        counter: passes so far, a 0-d int64 tensor that compiled graphs count in too.
        number: by which compiled graphs find it.
    """

    def __init__(self, site: Site, methods: list[Method], seed: int) -> None:
        self.site, self.methods, self.seed = site, methods, seed
        self.counter = torch.zeros((), dtype=torch.int64)
        self._enroll()

    def _enroll(self) -> None:
        self.number = next(_numbers)
        _by_number[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        twin = object.__new__(Passes)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        twin._enroll()
        return twin

    def open(self) -> Pass:
        """Open a pass: count it, or find the pass that it repeats."""
        if torch.compiler.is_compiling():
            # A graph can neither ask what is recomputed nor read the counter as a number: the operator does, each time
            # it runs.
            token = compiled_token(self.counter, self.number)
            return Pass(token[0], token[1])
        return self._open()

    def _open(self) -> Pass:
        first, repeated, rerun = recompute.regions()
        if repeated is not None:
            at = repeated.replay.setdefault(rerun, {})
            # A layer may run several times in one region: the n-th repeat is of the n-th run.
            nth = at.get(self.number, 0)
            at[self.number] = nth + 1
            known = repeated.keys.get(self.number, [])
            if nth < len(known):
                self._remember(first, known[nth])
                return Pass(known[nth], True, repeated, first)
        if recompute.in_backward():
            raise RuntimeError(REENTRANT.format(site=self.site.name, method=self.repeated_methods()))
        key = self._count(self.counter, first)
        return Pass(key, False, first[-1] if first else None, first)

    def _count(self, counter: Tensor, first: list[recompute.Region]) -> int:
        """Count a pass that is new, and give the key of its draws: of the run's seed, and of this process under
        distributed training."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        seed = mix(self.seed, torch.distributed.get_rank() if distributed else 0)
        key = mix(seed, self.site.index, int(counter))
        counter.add_(1)
        self._remember(first, key)
        return key

    def _remember(self, first: list[recompute.Region], key: int) -> None:
        for region in first:
            region.keys.setdefault(self.number, []).append(key)

    @property
    def repeats_matter(self) -> bool:
        """Return whether a pass that runs again would draw, penalise, carry or count a second time."""
        return any(map(_repeat_matters, self.methods))

    def repeated_methods(self) -> str:
        """Name the methods for which a repeated pass matters."""
        return " + ".join(repr(m) for m in self.methods if _repeat_matters(m)) or "a method"


def _repeat_matters(method: Method) -> bool:
    return method.draws() or method.penalizes or method.carries or method.counts_batches()


@torch.library.custom_op("headwise::token", mutates_args={"counter"})
def compiled_token(counter: Tensor, number: int) -> Tensor:
    """Return (key, again) of a pass when a compiled graph runs; the graph itself holds no state."""
    # By number: a graph that held the layer would keep its model alive, and could not serve a copy of it.
    passes = _by_number[number]
    first, repeated, _ = recompute.regions()
    if recompute.in_backward() and repeated is None:
        raise RuntimeError(COMPILED.format(site=passes.site.name, method=passes.repeated_methods()))
    if repeated is not None:
        made = passes._open()
        return torch.tensor([made.key, int(made.again)], dtype=torch.int64)
    return torch.tensor([passes._count(counter, first), 0], dtype=torch.int64)


@compiled_token.register_fake
def _(counter: Tensor, number: int) -> Tensor:
    return torch.empty(2, dtype=torch.int64)
