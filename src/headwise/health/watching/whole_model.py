"""Figures of the whole model around an optimizer's step: norms, the sharpness of the loss, gradients and updates."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.attend import FittedLayer, OptimizerSteps, Regularized
from headwise.health.statistics.sharpness import Underway, sharpness_underway
from headwise.health.watching.drift import DRIFTS, with_bases
from headwise.health.watching.figures import Figures
from headwise.health.watching.places import Places
from headwise.health.watching.updates import OF_STEP, Updates
from headwise.health.watching.weights import OUTSIDE, Matrices, Matrix, known_names, norm_in

MATRIX_NORM, SHARPNESS, SHARE = "matrix_norm", "sharpness", "sharpness_share"
OF_LOSS = (SHARPNESS, SHARE)
OF_MODEL = (MATRIX_NORM, *OF_LOSS, *OF_STEP)
# The site of a figure of the whole model.
MODEL = "model"
Loss = Callable[[], Tensor]


def names_with(statistics: list[str] | None, loss: Loss | None) -> list[str]:
    """Return the names of the statistics to watch after checking them.

    For None these are all statistics of heads and layers, and with a `loss` also those of the loss.

    Raises:
        ValueError: if a name is unknown, if a statistic needs a loss and there is none, or if none uses the loss.
    """
    names = with_bases(known_names(statistics, (*OF_MODEL, *DRIFTS)))
    if statistics is None:
        return [*names, *OF_LOSS] if loss is not None else names
    of_loss = [name for name in names if name in OF_LOSS]
    if of_loss and loss is None:
        raise ValueError(f"{of_loss[0]} needs a loss: pass watch() a loss= that returns the loss of a fixed batch")
    if loss is not None and not of_loss:
        raise ValueError(f"no statistic uses loss=: add {' or '.join(OF_LOSS)} to statistics=, or leave it out")
    return names


class WholeModel:
    """Reader of the figures of the whole model, once in each step that is read.

    They are read when torch's optimizer begins its step, after the training forwards, with the weights and the learning
    rate of that step.

    Args:
        names: names of statistics; those that are not in `OF_MODEL` are ignored.
        loss: a function that returns the loss of a fixed batch.
    """

    def __init__(self, places: Places, names: Sequence[str], loss: Loss | None) -> None:
        self.places, self.names, self.loss = places, [name for name in names if name in OF_MODEL], loss
        self.matrices = Matrices(places.model, places.all_sites) if MATRIX_NORM in self.names else None
        self.missing: dict[str, str] = {}
        self.updates = Updates(places.model, places.all_sites, self.names)
        self._step, self._armed = 0, False
        self._norms: dict[Matrix, Tensor] = {}
        self._sharpness: Underway | None = None
        self._done = self._seen = self._reported = False
        self._steps = OptimizerSteps(places.model, self._before)

    def arm(self, step: int, armed: bool) -> None:
        """Prepare for the next optimizer step, which is read if `armed`."""
        self._step, self._armed, self._done = step, armed, False
        self._norms, self._sharpness = {}, None
        if (armed and self.names) or self.updates.every_step:
            self._steps.listen()
        else:
            self._steps.stop()

    def waiting(self) -> list[Tensor]:
        """Return the values of this step, on their devices, and stop reading it."""
        self._steps.stop()
        curvature = [] if self._sharpness is None else self._sharpness.rows
        return [*self._norms.values(), *curvature, *self.updates.waiting()]

    def take(self, moved: Iterator[Tensor]) -> list[Figures]:
        """Return the figures of this step.

        Args:
            moved: the tensors that `waiting` returned, on the CPU.
        """
        figures = [self._figure(matrix.name, matrix.depth, MATRIX_NORM, norm_in(next(moved))) for matrix in self._norms]
        if self._sharpness is not None:
            of_loss = self._sharpness.read([next(moved) for _ in self._sharpness.rows])
            no_share = of_loss.share is None and SHARE in self.names
            self.missing = {SHARE: of_loss.missing} if no_share else {}
            for name, value in ((SHARPNESS, of_loss.value), (SHARE, of_loss.share)):
                if value is not None and name in self.names:
                    figures.append(self._figure(MODEL, OUTSIDE, name, value))
        return figures + self.updates.take(self._step, moved)

    def unseen(self, step: int) -> str:
        """Return, once, a warning that no optimizer step was seen; empty at step 0, which a scaler may skip."""
        if not self.names or self._seen or step == 0 or self._reported:
            return ""
        self._reported = True
        return (
            f"no step of a torch optimizer was seen on this model, so {', '.join(self.names)} are not read: call "
            "optimizer.step(), uncompiled, before watch.step()"
        )

    def reasons(self) -> dict[str, str]:
        """Return the reasons for missing figures and for matrices that are not read."""
        return self.missing | (self.matrices.missing if self.matrices else {}) | self.updates.missing

    def stop(self) -> None:
        """Stop reading optimizer steps."""
        self._steps.stop()

    def _before(self, number: int, optimizer: Optimizer) -> None:
        if self._done:
            return
        self._done = self._seen = True
        self.updates.before(optimizer, self._armed)
        if not self._armed:
            return
        if self.matrices is not None:
            self._norms = self.matrices.norms()
        if self.loss is not None and any(name in OF_LOSS for name in self.names):
            model, for_share = self.places.model, optimizer if SHARE in self.names else None
            with undisturbed(model, self.places.sites, self.places.regularized):
                self._sharpness = sharpness_underway(self.loss, model, for_share)

    def _figure(self, site: str, depth: int, name: str, value: float) -> Figures:
        return Figures(site, depth, self._step, name, "layer", array("d", [value]), None, False)


@contextmanager
def undisturbed(model: nn.Module, sites: Iterable[FittedLayer], handle: Regularized | None) -> Iterator[None]:
    """Run forwards without side effects on random states, buffers, the methods' penalties and the readings of heads."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    armed = [site for site in sites if site.armed]
    for site in armed:
        site.armed = False
    try:
        with torch.random.fork_rng(devices), nullcontext() if handle is None or handle.removed else handle.aside():
            yield
    finally:
        for site in armed:
            site.armed = True
        for buffer, before in buffers:
            # Through .data, because autograd counts writes; unconditionally, because a comparison waits for the device.
            buffer.data.copy_(before)
