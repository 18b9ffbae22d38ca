"""AlphaDecay: each matrix decays by how heavy the tail of its eigenvalues is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attend.optimizers.attached import ALPHA, DECAY, Attached, Held, check_optimizer
from headwise.attend.optimizers.cautious_decay import refuse_coupled
from headwise.attend.optimizers.parts import Part, Per, parts_of
from headwise.attend.projections.block import along, multiply_, whole
from headwise.attend.regularizing.parameter_groups import ParameterGroups
from headwise.files.arguments import finite_number, is_a
from headwise.numerics.heavy_tail import hill_exponent

# Keys of a group: the factors of its parameters' parts, and the steps since they were computed.
FACTORS, AGE = "alpha_factors", "alpha_age"


class AlphaDecay(Attached):
    """Decays matrices with a heavy tail of eigenvalues less, and those with a light tail more.

    Each matrix decays with λ·f, f linear in its PL_Alpha_Hill from `low` at the least exponent of the model to `high`
    at the largest: He et al. 2025, arXiv 2506.14562. The exponents are read before the first step and every `every`
    steps. Matrices of fewer than `least` singular values keep λ, as do all other parameters. The weight decays of the
    matrices move from their groups' `weight_decay` to `alpha_decay`, and the factors are saved with the groups.

    Args:
        optimizer: any with decoupled weight decay, such as `torch.optim.AdamW` or `headwise.Muon`.
        groups: what `headwise.parameter_groups` returned, from which the optimizer was built.
        per: "matrix" as in the source, "head", or "group" for `heads_per_group` heads.
        heads_per_group: query heads of a group.
        layers: "all", or "attention" to leave the matrices of MLPs out.
        every: optimizer steps between readings.
        low, high: f at the heaviest and at the lightest tail; the source's for language models.
        least: singular values of a matrix whose tail is read.

    Raises:
        TypeError, ValueError: if the optimizer decays none of these matrices, adds its decay to the gradient, or the
            heads of a layer cannot be told or divided.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> groups = headwise.parameter_groups(model, lr=1e-3, weight_decay=0.1)
        >>> decay = headwise.AlphaDecay(torch.optim.AdamW(groups), groups, least=16)
        >>> len(decay.exponents())
        12
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: ParameterGroups,
        per: Per = "matrix",
        *,
        heads_per_group: int | None = None,
        layers: str = "all",
        every: int = 500,
        low: float = 2 / 3,
        high: float = 3.0,
        least: int = 50,
    ) -> None:
        check_optimizer(optimizer)
        _check(every, low, high, least)
        refuse_coupled(optimizer, "AlphaDecay")
        if any(group.get(DECAY) for group in optimizer.param_groups):
            raise ValueError("CautiousDecay has taken this optimizer's weight decay: use it or AlphaDecay")
        super().__init__(optimizer)
        self.every, self.low, self.high, self.least = every, low, high, least
        self.parts = parts_of(groups, per, heads_per_group, layers, "AlphaDecay")
        self._find(groups, self.parts.of, "AlphaDecay")
        decayed = [
            place
            for place in self._places
            if optimizer.param_groups[place[0]].get("weight_decay") or optimizer.param_groups[place[0]].get(ALPHA)
        ]
        if not decayed:
            raise ValueError("AlphaDecay finds no weight decay of these matrices: set weight_decay above 0")
        self._places = decayed
        self._made: dict[tuple[int, int], tuple[list[list[float]], Tensor]] = {}
        self._attach()
        self._take()

    def _take(self) -> list[dict[str, Any]]:
        """Take the decays of the groups with matrices, and return these groups."""
        owners = [self.optimizer.param_groups[at] for at in sorted({at for at, _, _ in self._places})]
        for group in owners:
            # a decay of 0 is one too: a state from before this was attached has no other
            if group.get("weight_decay") or ALPHA not in group:
                group[ALPHA], group["weight_decay"] = group["weight_decay"], 0.0
        return owners

    def remove(self) -> None:
        """Return the decays to the optimizer, which then applies them to all weights alike."""
        if self._hooks:
            for group in self.optimizer.param_groups:
                if ALPHA in group:
                    group["weight_decay"] = group.pop(ALPHA)
                    group.pop(FACTORS, None)
                    group.pop(AGE, None)
        super().remove()

    @torch.no_grad()
    def exponents(self) -> dict[str, list[float]]:
        """Return PL_Alpha_Hill of the matrices that are read now, by parameter and part, such as "…c_attn.weight q"."""
        return {
            f"{self.parts.name(held.parameter)} {part.kind}": exponent.tolist()
            for held, exponents in self._read()
            for part, exponent in zip(held.parts, exponents, strict=True)
            if exponent is not None
        }

    def _read(self) -> list[tuple[Held, list[Tensor | None]]]:
        return [(held, self._exponents(held)) for held in self._held(moved=False)]

    def _exponents(self, held: Held) -> list[Tensor | None]:
        """Return the exponents (count,) of each part, or None for one whose matrices are too small."""
        weight = whole(held.parameter.detach())
        stacks = [part.of(weight) for part in held.parts]
        small = [min(stack.shape[1:]) < self.least for stack in stacks]
        wide = [stack if stack.dtype == torch.float64 else stack.float() for stack in stacks]
        return [None if few else hill_exponent(torch.linalg.svdvals(x)) for few, x in zip(small, wide, strict=True)]

    def _renew(self) -> None:
        """Compute the factors of all parts from the current weights."""
        read = self._read()
        found = [exponent for _, exponents in read for exponent in exponents if exponent is not None]
        known = torch.cat([x.cpu() for x in found]) if found else torch.zeros(0)
        known = known[known.isfinite()]
        first, last = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        for at in {at for at, _, _ in self._places}:
            group = self.optimizer.param_groups[at]
            group[FACTORS] = [[] for _ in group["params"]]
            group[AGE] = 0
        for (at, index, parts), (_, exponents) in zip(self._places, read, strict=True):
            self.optimizer.param_groups[at][FACTORS][index] = [
                [1.0] * part.count if exponent is None else [self._factor(x, first, last) for x in exponent.tolist()]
                for part, exponent in zip(parts, exponents, strict=True)
            ]

    def _factor(self, exponent: float, first: float, last: float) -> float:
        if not last > first or exponent != exponent:
            return 1.0
        share = min(1.0, (exponent - first) / (last - first))
        return self.low + (self.high - self.low) * share

    @torch.no_grad()
    def _before(self, closure: bool) -> None:
        """Decay the weights, as decoupled decays do before the update."""
        # A schedule, or a state from before this was attached, may have set decays.
        owners = self._take()
        if any(group.get(AGE, self.every) >= self.every for group in owners) or not self._factors_fit():
            self._renew()
        held = {id(self.optimizer.param_groups[at]["params"][index]) for at, index, _ in self._places}
        for group in owners:
            group[AGE] += 1
            # the decay of the group's other parameters was taken with that of its matrices
            for other in group["params"]:
                if id(other) not in held and (other.grad is not None or closure):
                    other.mul_(1 - group["lr"] * group[ALPHA])
        for at, index, parts in self._places:
            group = self.optimizer.param_groups[at]
            parameter: Any = group["params"][index]
            # a closure computes gradients within the step
            if parameter.grad is None and not closure:
                continue
            own, decay = group[FACTORS][index], group["lr"] * group[ALPHA]
            if len({factor for part in own for factor in part}) == 1:
                parameter.mul_(1 - decay * own[0][0])
            else:
                multiply_(parameter, 1 - decay * self._spread(at, index, parameter, parts, own))

    def _factors_fit(self) -> bool:
        """Return whether the factors are those of these parts, as a loaded state's may not be."""
        return all(
            [len(own) for own in self.optimizer.param_groups[at][FACTORS][index]] == [part.count for part in parts]
            for at, index, parts in self._places
        )

    def _spread(self, at: int, index: int, parameter: Tensor, parts: list[Part], factors: list[list[float]]) -> Tensor:
        """Return the factor of each row of a parameter, in a shape that multiplies it, made once for its factors."""
        known, made = self._made.get((at, index), (None, None))
        if known is not factors or made is None:
            made = spread(parameter, parts, factors)
            self._made[at, index] = factors, made
        return made

    def _after(self) -> None:
        """Nothing is left to do."""


def spread(parameter: Tensor, parts: list[Part], factors: list[list[float]]) -> Tensor:
    """Return the factor of each row of a parameter, in a shape that multiplies it."""
    axis = parts[0].axis or 0
    rows = torch.ones(parameter.shape[axis], dtype=torch.float64)
    for part, own in zip(parts, factors, strict=True):
        each = torch.tensor(own, dtype=torch.float64)
        where = slice(None) if part.axis is None else part.rows.cpu() if isinstance(part.rows, Tensor) else part.rows
        count = len(rows[where]) // part.count
        rows[where] = each.repeat_interleave(count)
    return along(rows, axis, parameter).to(parameter.device, parameter.dtype)


def _check(every: object, low: object, high: object, least: object) -> None:
    for name, value, smallest in (("every", every, 1), ("least", least, 2)):
        is_a(name, value, int, "a whole number")
        if value < smallest:  # type: ignore[operator]  # checked above
            raise ValueError(f"{name} must be at least {smallest}, got {value}")
    finite_number("low", low)
    finite_number("high", high)
    if low > high:  # type: ignore[operator]  # checked above
        raise ValueError(f"low must be at most high, got low={low}, high={high}")
