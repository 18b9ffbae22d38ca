"""Fit the methods of an arm onto a model: on the layers that it names, with its schedules in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from headwise.experiments.arm import Arm

if TYPE_CHECKING:
    from headwise.regularizing.handle import Regularized


def fit(arm: Arm, model: nn.Module, *, example: Any, seed: int, steps: int) -> Regularized | None:
    """Regularize a model as the arm says, in a training of `steps` optimizer steps; None for an arm without methods.

    Raises:
        StudyError: where the arm asks for layers that the model does not have.
        ValueError: where a method has no meaning on them.
    """
    if not arm.methods:
        return None
    from headwise.hosts.finding import sites
    from headwise.regularizing.regularize import regularize

    if arm.where is not None:
        arm.where.check(sites(model))
    handle = regularize(model, *arm.methods, where=arm.where, example=example, seed=seed)
    for place, name, timed in arm.timed:
        handle.set(handle.methods[place], **{name: timed.schedule(steps)})
    return handle
