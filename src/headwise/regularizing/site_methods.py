"""The methods that stand on one site, and what each keeps there."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.random_draws import mix
from headwise.core.site import Site


class SiteMethods:
    """Methods in order of action, each with its state, its live strengths and the salt of its draws.

    Attributes:
        methods: in order of action.
        states: of each, its parameters and values on the site.
        values: of each, its live strengths by name, 0-d fp32 tensors.
        salts: of each, what tells its draws from those of the others.
    """

    def __init__(self, site: Site, methods: list[Method], seed: int) -> None:
        self.site, self.methods = site, methods
        names = [type(method).__name__ for method in methods]
        # A method that stands here twice keeps two states: the second is numbered.
        earlier = [names[:place].count(name) for place, name in enumerate(names)]
        self.states = [
            MethodState(site.module, name if before == 0 else f"{name}_{before + 1}", seed)
            for name, before in zip(names, earlier, strict=True)
        ]
        # 0-d tensors: a changed strength is a changed value, never a changed graph.
        self.values = [{n: torch.tensor(m.at(n, 0, site), dtype=torch.float32) for n in m.live} for m in methods]
        for state, values in zip(self.states, self.values, strict=True):
            state.follow(values)
        # By name and not by place: a method draws what it draws alone, whatever stands beside it.
        self.salts = [mix(name, before) >> 1 for name, before in zip(names, earlier, strict=True)]

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteMethods:
        twin = object.__new__(SiteMethods)
        memo[id(self)] = twin
        # Methods are frozen and are known by identity: the copy shares them.
        twin.methods = list(self.methods)
        twin.site, twin.states = copy.deepcopy(self.site, memo), copy.deepcopy(self.states, memo)
        twin.values, twin.salts = copy.deepcopy(self.values, memo), list(self.salts)
        return twin

    def index(self, method: Method) -> int:
        """Give the place of a method in the order of action, found by identity."""
        for place, known in enumerate(self.methods):
            if known is method:
                return place
        raise KeyError(f"{method!r} does not act on {self.site.name}")

    def active(self, training: bool) -> list[Method]:
        """Give the methods that act in this mode, in order."""
        return [m for m in self.methods if m.acts_in(training)]

    def needs(self, stage: str) -> bool:
        """Tell whether any method here defines the stage."""
        return any(m.overrides(stage) for m in self.methods)

    def strength(self, method: Method, name: str) -> Tensor:
        """Give the live field `name` of a method as a 0-d fp32 tensor."""
        return self.values[self.index(method)][name]

    def adds_nothing(self, method: Method) -> bool:
        """Tell whether a penalty's strength is 0 now: then the host's own computation stands, bit for bit.

        A compiled graph holds no value of a strength, so it reads the penalty all the same.
        """
        if torch.compiler.is_compiling() or not method.penalizes or method.neutral != {"strength": 0.0}:
            return False
        return float(self.strength(method, "strength")) == 0.0

    @property
    def repeats_matter(self) -> bool:
        """Tell whether a repeated pass matters to a method here."""
        return any(map(_repeat_matters, self.methods))

    def stateful(self) -> str:
        """Name the methods for which a repeated pass matters."""
        return " + ".join(repr(m) for m in self.methods if _repeat_matters(m)) or "a method"

    def drop(self, method: Method, fold: bool) -> None:
        """Take one method off: folded into plain weights where asked and possible, else undone."""
        place = self.index(method)
        state = self.states[place]
        if fold and method.overrides("fold"):
            method.fold(self.site, state)
        elif method.overrides("unbuild"):
            method.unbuild(self.site, state)
        state.clear()
        for part in (self.methods, self.states, self.values, self.salts):
            del part[place]


def _repeat_matters(method: Method) -> bool:
    return method.draws() or method.penalizes or method.carries or method.counts_batches()
