"""Maxima over the training forwards of a step, without those of forwards that no backward went through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core.unread_penalties import AwaitedForward
from headwise.borders import copy_all_

LEAST = float("-inf")
# The values of all buffers of a device, one after the other.
Values = dict[torch.device, Tensor]


class StepMaxima:
    """Sets aside what each training forward of the whole model wrote into the `maxima` of methods, until the step.

    The batch that a loop skips, a forward that failed and one without gradients count in no step. Forwards of which
    nothing is known count: those of models that are compiled as a whole, and parts that are called apart. The only
    forward of a step counts too.
    """

    def __init__(self) -> None:
        self._aside: list[tuple[AwaitedForward, Values]] = []
        # The forward that wrote the buffers; None if they hold nothing, or what no forward is known to have written.
        self._run: AwaitedForward | None = None

    # What is set aside belongs to the graphs of this model's forwards.
    def __deepcopy__(self, memo: dict[int, object]) -> StepMaxima:
        return StepMaxima()

    def __reduce__(self) -> tuple[type[StepMaxima], tuple[()]]:
        return StepMaxima, ()

    def begin(self, fitted: Sequence[FittedLayer], run: AwaitedForward, *, trains: bool) -> None:
        """Begin a forward of the whole model in training mode; `trains` says whether it has gradients."""
        run.heard = True
        if self._run is not None or not trains:
            self.put_aside(fitted)
        self._run = run

    def end(self, fitted: Sequence[FittedLayer], *, counts: bool) -> None:
        """End it, and forget what it wrote if it failed or has no gradients."""
        # The model may have called itself.
        if self._run is not None and not self._run.running and not counts:
            self.forget(fitted)

    def forget(self, fitted: Sequence[FittedLayer]) -> None:
        """Empty the buffers."""
        buffers = _buffers(fitted)
        _write(buffers, {device: torch.full_like(x, LEAST) for device, x in _values(buffers).items()})
        self._run = None

    def put_aside(self, fitted: Sequence[FittedLayer]) -> None:
        """Empty the buffers, and keep what the step may still need."""
        self._aside.append((self._run or AwaitedForward(), _values(_buffers(fitted))))
        self.forget(fitted)
        done = [entry for entry in self._aside if entry[0].differentiated]
        left = [entry for entry in self._aside if not entry[0].differentiated and not entry[0].skipped]
        # Accumulated batches would take memory one by one.
        self._aside = [(done[0][0], _largest([values for _, values in done])), *left] if done else left

    def settle(self, fitted: Sequence[FittedLayer]) -> None:
        """Write the maxima of the forwards that belong to the step into the buffers."""
        aside, run = self._aside, self._run
        self._aside, self._run = [], None
        if aside:
            buffers = _buffers(fitted)
            entries = [*aside, (run or AwaitedForward(), _values(buffers))]
            # Nothing was noticed of a backward that compiled code or a transform makes.
            every = not any(run.differentiated for run, _ in entries)
            _write(buffers, _largest([x for run, x in entries if every or run.differentiated or not run.known]))


def _buffers(fitted: Sequence[FittedLayer]) -> list[Tensor]:
    return [
        state.tensor(name)
        for f in fitted
        for method, state in zip(f.methods, f.states, strict=True)
        for name in method.maxima
    ]


def _values(buffers: Sequence[Tensor]) -> Values:
    devices = dict.fromkeys(x.device for x in buffers)
    return {device: torch.cat([x for x in buffers if x.device == device]) for device in devices}


def _write(buffers: Sequence[Tensor], values: Values) -> None:
    for device, flat in values.items():
        there = [x for x in buffers if x.device == device]
        copy_all_(there, list(flat.split([x.numel() for x in there])))


def _largest(entries: Sequence[Values]) -> Values:
    return reduce(lambda a, b: {device: torch.maximum(x, b[device]) for device, x in a.items()}, entries)
