"""Checks for changes to a regularized model that its methods cannot follow: adapters, shards, replaced layers."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from headwise.attend import projections
from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method
from headwise.attend.core.passes import UNDIFFERENTIATED
from headwise.attend.hosts.layers.hooks import Hooks
from headwise.attend.projections import ProjectionError
from headwise.attend.projections.adapted import MERGERS, base_of, is_adapted
from headwise.attend.projections.block import Block
from headwise.attend.regularizing.learned_parameters import is_own
from headwise.borders import forward_hooks_of, made_of, own_modules


def check_reached(model: nn.Module, fitted: list[FittedLayer], first: bool) -> None:
    """Raise RuntimeError if methods did nothing because a training step did not reach their layers.

    Args:
        first: whether this is the first step. In later steps a layer may be skipped if it is still in the model.
    """
    missing = [f for f in fitted if not f.reached and f.methods]
    if missing and first:
        _check_first(missing)
    elif missing:
        _check_replaced(model, missing)


COMPILED = ". A graph that torch.compile made before regularize() knows nothing of it: torch.compiler.reset() drops it"


def _check_first(missing: list[FittedLayer]) -> None:
    never = [f.site.name for f in missing if not f.without_gradients]
    if never:
        raise RuntimeError(
            f"never reached in the first training step: {', '.join(never)}. The methods there did nothing. Call the "
            "model in training mode before loss() and after_step(), or leave these sites out with where=" + COMPILED
        )
    # Methods without draws, penalties and carried values do the same however often a layer runs.
    repeated = [f for f in missing if f.passes.repeats_matter]
    if repeated:
        names = ", ".join(f.site.name for f in repeated)
        methods = " + ".join(dict.fromkeys(f.passes.repeated_methods() for f in repeated))
        raise RuntimeError(UNDIFFERENTIATED.format(sites=names, methods=methods))


def _check_replaced(model: nn.Module, missing: list[FittedLayer]) -> None:
    modules = set(model.modules())
    gone = [f.site.name for f in missing if f.site.module not in modules]
    if gone:
        raise RuntimeError(
            f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} no longer in the model, so that the methods there "
            "do nothing: other modules were put in their place after regularize(). Put the layers back, or call "
            "remove() and regularize() the model as it is now"
        )


REMEDY = (
    "adapters, frozen layers and shards belong before regularize(): call it last, on the model as it will be trained "
    "(remove() first removes the methods)"
)


def check_followed(fitted: Iterable[FittedLayer]) -> None:
    """Check that methods which read or write weights between forwards still can, before any of them acts.

    Nothing is asked again while the model has the same modules and parameters.

    Raises:
        RuntimeError: if one no longer can; the message names the layer, the method and what changed.
    """
    layers = [layer for layer in fitted if any(map(_asks, layer.methods))]
    if not layers:
        return
    # Adapters are switched on and off in place.
    model = None if MERGERS in sys.modules else layers[0].site.model
    parts, trained = ([], []) if model is None else made_of(model)
    if model is not None and layers[0] in _followed:
        known, before = _followed[layers[0]]
        same = before == trained and len(known) == len(parts)
        if same and all(map(operator.is_, [part() for part in known], parts)):
            return
    for layer in layers:
        for method in layer.methods:
            if method.overrides("penalty") or method.overrides("after_step"):
                reason = method.refuse(layer.site)
                if reason is not None:
                    raise RuntimeError(f"{layer.site.name}: {method!r} can no longer act: {reason}; {REMEDY}")
        if layer.needs("branch"):
            _check_branch(layer)
        _check_learned(layer)
    if model is not None:
        _followed[layers[0]] = [weakref.ref(part) for part in parts], trained


# What the model of a first layer was made of when all of its layers were last checked: that takes as long as their
# forward. References and not ids, which a new module takes over from one that was deleted.
_followed: weakref.WeakKeyDictionary[FittedLayer, tuple[list[Any], list[Any]]] = weakref.WeakKeyDictionary()


def _asks(method: Method) -> bool:
    stages = ("penalty", "after_step", "branch")
    return method.has_parameters() or any(method.overrides(stage) for stage in stages)


def _check_branch(layer: FittedLayer) -> None:
    """Raise RuntimeError if adapters wrap an output projection whose own output is hooked."""
    block: Block | None
    try:
        block = projections.output(layer.site, "what acts on the branch")
    except ProjectionError:
        block = projections.of(layer.site).o
    if block is None or not block.adapted:
        return
    # The adapter wraps the layer: hooks on the inner layer miss what the adapter adds.
    owners = [getattr(hook, "__self__", None) for hook in forward_hooks_of(base_of(block.module)).values()]
    if any(isinstance(owner, Hooks) and owner.fitted is layer for owner in owners):
        names = [repr(m) for m in layer.methods if m.overrides("branch")]
        raise RuntimeError(
            f"{layer.site.name}: {' + '.join(names)} sees the output of {block.where.rpartition('.')[0]} without the "
            f"adapters that were added after regularize(); {REMEDY}"
        )


def _check_learned(layer: FittedLayer) -> None:
    """Raise RuntimeError if methods' learned parameters were frozen with the backbone, as peft does."""
    learners = [m for m in layer.methods if m.has_parameters()]
    added = own_modules(layer.site.module).get("headwise")
    # Most often asked and answered by the first parameter.
    if not learners or (added is not None and any(p.requires_grad for p in added.parameters())):
        return
    own = [p for name, p in layer.site.module.named_parameters() if is_own(name)]
    model = layer.site.model
    # Without adapters in the model, the user froze them on purpose.
    if own and model is not None and not any(p.requires_grad for p in own) and any(map(is_adapted, model.modules())):
        names = " + ".join(map(repr, learners))
        raise RuntimeError(
            f"{layer.site.name}: the parameters that {names} learns are frozen (requires_grad=False), "
            f"as get_peft_model() freezes all but its adapters; {REMEDY}"
        )
