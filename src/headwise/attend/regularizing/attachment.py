"""Attach methods to the sites of a model, all or none; fold them into weights; detach them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import SharedState
from headwise.attend.regularizing.plan import Plan


def fold_methods(fitted: list[FittedLayer]) -> list[FittedLayer]:
    """Fold or drop the methods that evaluation does not need, and return the sites that keep a method."""
    remaining = []
    for layer in fitted:
        for method in [m for m in layer.methods if m.overrides("fold") or not m.acts_in(training=False)]:
            layer.drop(method, fold=True)
        if layer.methods or layer.shares_values:
            remaining.append(layer)
    # A layer shares its values only for methods that carry them: without methods nothing is shared.
    return remaining if any(layer.methods for layer in remaining) else []


def attach(plan: Plan, shared: SharedState) -> list[FittedLayer]:
    """Fit the methods of a plan and return the fitted layers; if one step fails, all are undone."""
    adapters = {f.site: f.adapter for f in plan.found}
    counts = Counter(id(method) for _, methods in plan.chosen for method in methods)
    layers: list[FittedLayer] = []
    built: set[int] = set()
    undo: list[Callable[[], None]] = []
    try:
        for site, methods in plan.chosen:
            fitted = FittedLayer(site, methods, shared, adapters[site])
            layers.append(fitted)
            fitted.shares_values = site in plan.read
            _build(fitted, counts, built, undo)
            built |= set(map(id, methods))
            # Registered before the step, so that a step that fails half-way is undone too.
            undo.append(fitted.detach)
            fitted.attach()
    except BaseException:
        # No site may count as fitted while adapters leave: the last one to leave restores the state that all share.
        for fitted in layers:
            fitted.alive = False
        for step in reversed(undo):
            step()
        raise
    return layers


def _build(fitted: FittedLayer, counts: Counter[int], built: set[int], undo: list[Callable[[], None]]) -> None:
    for method, state in zip(fitted.methods, fitted.states, strict=True):
        undo.append(state.clear)
        state.first = id(method) not in built
        if method.over_layers == "mean":
            state.layers = counts[id(method)]
        if method.overrides("build"):
            method.build(fitted.site, state)
        if method.overrides("unbuild"):
            undo.append(partial(method.unbuild, fitted.site, state))


def detach(which: Iterable[FittedLayer], fold: bool) -> None:
    """Remove the methods of these sites and detach the sites; with `fold`, into plain weights where possible."""
    for fitted in list(which):
        for method in list(fitted.methods):
            fitted.drop(method, fold=fold)
        fitted.detach()
