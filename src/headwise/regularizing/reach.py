"""Reach: whether training comes to the layers on which methods stand."""

from __future__ import annotations

from torch import nn

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.passes import UNDIFFERENTIATED


def check(model: nn.Module, fitted: list[FittedLayer], first: bool) -> None:
    """Raise RuntimeError where methods did nothing because a training step did not come to their layers.

    Args:
        model: the regularized model.
        fitted: its sites; which of them were reached is known since the last optimizer step.
        first: whether this is the first step. In later ones a layer may rest, as long as it is still in the model.
    """
    missing = [f for f in fitted if not f.reached and f.methods]
    if missing and first:
        _check_first(missing)
    elif missing:
        _check_replaced(model, missing)


def _check_first(missing: list[FittedLayer]) -> None:
    never = [f.site.name for f in missing if not f.without_gradients]
    if never:
        raise RuntimeError(
            f"never reached in the first training step: {', '.join(never)}. The methods there did nothing. Call the "
            "model "
            "in training mode before loss() and after_step(), or leave these sites out with where="
        )
    # Methods without draws, penalties and carried values do the same however often a layer runs.
    repeated = [f for f in missing if f.passes.repeats_matter]
    if repeated:
        names, methods = (
            ", ".join(f.site.name for f in repeated),
            dict.fromkeys(f.passes.repeated_methods() for f in repeated),
        )
        raise RuntimeError(UNDIFFERENTIATED.format(sites=names, methods=" + ".join(methods)))


def _check_replaced(model: nn.Module, missing: list[FittedLayer]) -> None:
    modules = set(model.modules())
    gone = [f.site.name for f in missing if f.site.module not in modules]
    if gone:
        raise RuntimeError(
            f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} no longer in the model, so that the methods there "
            "do nothing: what "
            "stands in the place now was put there after regularize(). Put the layers back, or call remove() and "
            "regularize() the "
            "model as it is now"
        )
