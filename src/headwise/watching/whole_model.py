"""Figures of the whole model: norms, the sharpness of the loss, gradients and updates, read around an optimizer's
step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.attention.fitted_layer import FittedLayer
from headwise.regularizing.handle import Regularized
from headwise.regularizing.optimizer_steps import OptimizerSteps
from headwise.statistics.curvature import Underway, sharpness_underway
from headwise.watching.figures import Figures
from headwise.watching.places import Places
from headwise.watching.updates import OF_STEP, Updates
from headwise.watching.weights import OUTSIDE, Matrices, Matrix, known_names, norm_in

MATRIX_NORM, SHARPNESS, SHARE = "matrix_norm", "sharpness", "sharpness_share"
OF_LOSS = (SHARPNESS, SHARE)
OF_MODEL = (MATRIX_NORM, *OF_LOSS, *OF_STEP)
# The site of a figure that belongs to the model.
MODEL = "model"
Loss = Callable[[], Tensor]


def names_with(statistics: list[str] | None, loss: Loss | None) -> list[str]:
    """Check the names of what is watched; None: all of heads and layers, and with a `loss` what is read of it.

    Raises:
        ValueError: where one is unknown, or is read of a loss and there is none.
    """
    names = known_names(statistics, OF_MODEL)
    if statistics is None:
        return [*names, *OF_LOSS] if loss is not None else names
    without = [name for name in names if name in OF_LOSS]
    if without and loss is None:
        raise ValueError(f"{without[0]} is read of a loss: pass watch() a loss= that gives it on a fixed batch")
    if loss is not None and not without:
        raise ValueError(f"loss= is given and nothing is read of it: name {' or '.join(OF_LOSS)} among the statistics")
    return names


class WholeModel:
    """Reads the figures that belong to the model and not to a head, once in a step that is read.

    They are read when torch's optimizer begins its step: at the weights, and with the learning rate, of that step,
    after the forwards that train.

    Args:
        names: of these figures.
        loss: gives the loss of a fixed batch.
    """

    def __init__(self, places: Places, names: Sequence[str], loss: Loss | None) -> None:
        self.places, self.names, self.loss = places, [name for name in names if name in OF_MODEL], loss
        self.matrices = Matrices(places.model, places.all_sites) if MATRIX_NORM in self.names else None
        self.missing: dict[str, str] = {}
        self.updates = Updates(places.model, places.all_sites, self.names)
        self._step, self._armed = 0, False
        self._norms: dict[Matrix, Tensor] = {}
        self._sharpness: Underway | None = None
        self._done = self._seen = self._told = False
        self._steps = OptimizerSteps(places.model, self._before)

    def arm(self, step: int, armed: bool) -> None:
        """Read before the next step of an optimizer, or leave it alone."""
        self._step, self._armed, self._done = step, armed, False
        self._norms, self._sharpness = {}, None
        if (armed and self.names) or self.updates.every_step:
            self._steps.listen()
        else:
            self._steps.stop()

    def waiting(self) -> list[Tensor]:
        """Return what was read of this step, where it lies, and read no more of it."""
        self._steps.stop()
        curvature = [] if self._sharpness is None else self._sharpness.rows
        return [*self._norms.values(), *curvature, *self.updates.waiting()]

    def take(self, moved: Iterator[Tensor]) -> list[Figures]:
        """Return the figures of this step from what was `waiting`, brought to the CPU."""
        found = [self._figure(one.name, one.depth, MATRIX_NORM, norm_in(next(moved))) for one in self._norms]
        if self._sharpness is not None:
            of_loss = self._sharpness.read([next(moved) for _ in self._sharpness.rows])
            without = of_loss.share is None and SHARE in self.names
            self.missing = {SHARE: of_loss.missing} if without else {}
            for name, value in ((SHARPNESS, of_loss.value), (SHARE, of_loss.share)):
                if value is not None and name in self.names:
                    found.append(self._figure(MODEL, OUTSIDE, name, value))
        return found + self.updates.take(self._step, moved)

    def unseen(self, step: int) -> str:
        """Say once that no optimizer was seen to step though one was to be read; a scaler may leave out the very first
        steps."""
        if not self.names or self._seen or step == 0 or self._told:
            return ""
        self._told = True
        return (
            f"no step of an optimizer of torch was seen on this model, so that {', '.join(self.names)} are not read: "
            "call optimizer.step(), uncompiled, before watch.step()"
        )

    def reasons(self) -> dict[str, str]:
        """Say why a figure is missing, or a matrix is not read."""
        return self.missing | (self.matrices.missing if self.matrices else {}) | self.updates.missing

    def stop(self) -> None:
        """Read nothing more."""
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
            model, of = self.places.model, optimizer if SHARE in self.names else None
            with undisturbed(model, self.places.sites, self.places.regularized):
                self._sharpness = sharpness_underway(self.loss, model, of)

    def _figure(self, site: str, depth: int, name: str, value: float) -> Figures:
        return Figures(site, depth, self._step, name, "layer", array("d", [value]), None, False)


@contextmanager
def undisturbed(model: nn.Module, sites: Iterable[FittedLayer], handle: Regularized | None) -> Iterator[None]:
    """Let forwards run that leave nothing behind: no draw, no buffer, no penalty of a method, no reading of a head."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    armed = [site for site in sites if site.armed]
    for site in armed:
        site.armed = False
    try:
        with torch.random.fork_rng(devices), nullcontext() if handle is None or handle.removed else handle.aside():
            yield
    finally:
        for site in armed:
            site.armed = True
        for buffer, before in kept:
            # through .data, for autograd counts writes, and without a question, for which a device would wait
            buffer.data.copy_(before)
