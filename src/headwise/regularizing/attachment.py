"""Attach and detach: methods and adapters go onto the sites of a model, all or none, and leave them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from headwise.core.site import Site
from headwise.hosts.layers.candidate import Adapter
from headwise.regularizing.fitted_site import Fitted
from headwise.regularizing.owner import Owner
from headwise.regularizing.plan import Plan


def attach(made: Plan, owner: Owner) -> tuple[list[Fitted], dict[Site, Adapter]]:
    """Fit what was planned, and give the fitted sites and their adapters; where one step fails, all are undone."""
    adapters = {f.site: f.adapter for f in made.found if f.adapter is not None}
    every: list[Fitted] = []
    undo: list[Callable[[], None]] = []
    try:
        for site, methods in made.chosen:
            fitted = Fitted(site, methods, owner)
            every.append(fitted)
            fitted.shares_values = site in made.read
            _build(fitted, undo)
            # Before the step itself, for a step that fails half-way is undone too.
            undo.append(adapters[site].detach)
            adapters[site].attach(fitted)
    except BaseException:
        # A site no longer counts as fitted when its adapter leaves: the last one gives back what all share.
        for fitted in every:
            fitted.alive = False
        for step in reversed(undo):
            step()
        raise
    return every, {fitted.site: adapters[fitted.site] for fitted in every}


def _build(fitted: Fitted, undo: list[Callable[[], None]]) -> None:
    for method, state in zip(fitted.methods, fitted.states, strict=True):
        undo.append(state.clear)
        if method.overrides("build"):
            method.build(fitted.site, state)
        if method.overrides("unbuild"):
            undo.append(partial(method.unbuild, fitted.site, state))


def detach(which: Iterable[Fitted], adapters: dict[Site, Adapter], fold: bool) -> None:
    """Take the methods off these sites, folded into plain weights where asked and possible, and give the sites back."""
    for fitted in list(which):
        for method in list(fitted.methods):
            fitted.here.drop(method, fold=fold)
        fitted.alive = False
        adapters.pop(fitted.site).detach()
