"""The premises of a world: without them, a gain in it says nothing about its symptom. All margins are fixed here.

They are measured on validation data, at the plain model's own best rate, on six seeds that nothing else uses. The
eased world of a symptom of depth is another model, so it has a best rate of its own, searched as the plain model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwise_papers.league.contest_files import SmallWorld
from headwise_papers.league.rate_search import Chosen, Errors
from headwise_papers.league.run_ledger import Run

SEEDS = tuple(range(3000, 3006))
# share of errors by which the plain model must beat a simple predictor, and the eased world the world itself
BY = 0.1
# a model memorises if its training error is below this share of its validation error
MEMORISED = 0.5
# share of runs at the usual rate that must fail in a world of unstable training
FAIL = 0.5


@dataclass(frozen=True)
class Premise:
    """One premise: its name, what it says, the two figures that it compares, and whether it holds."""

    name: str
    says: str
    figure: float
    level: float
    holds: bool


def needed(world: SmallWorld, plain: Chosen, eased_rate: float) -> list[Run]:
    """Return the runs from which the premises are computed."""
    own = [Run("baseline", plain.rate, seed) for seed in SEEDS]
    eased = [Run("baseline", eased_rate, seed, eased=True) for seed in SEEDS] if world.eased else []
    usual = [Run("baseline", world.usual_rate, seed) for seed in SEEDS] if world.symptom == "unstable training" else []
    return list(dict.fromkeys([*own, *eased, *usual]))


def premises(
    world: SmallWorld, plain: Chosen, eased_rate: float, errors: Errors, simple: Mapping[str, float]
) -> list[Premise]:
    """Return the premises of a world, whose runs are all there; `simple` has the errors of simple predictors by name.

    Every world: the plain model makes a tenth fewer errors than each of these. Its symptom, and room for a gain, are
    tested by symptom.
    """
    own = [Run("baseline", plain.rate, seed) for seed in SEEDS]
    error, train = _mean(errors, own), _mean(errors, own, "train")
    found = [
        _below("learned", f"fewer errors than {name}, by a tenth", error, (1 - BY) * value)
        for name, value in simple.items()
    ]
    if world.symptom == "memorising":
        says = "training error below half of the validation error"
        found.append(_below("symptom", says, train, MEMORISED * error))
    if world.symptom == "few examples":
        found.append(
            _below("symptom", "training error below the validation error, by a tenth", train, (1 - BY) * error)
        )
    if world.symptom == "too little training":
        found.append(_above("symptom", "training error above half of the validation error", train, MEMORISED * error))
    if world.symptom == "unstable training":
        found.append(_fails(world, errors, simple))
        return found
    eased = _mean(errors, [Run("baseline", eased_rate, seed, eased=True) for seed in SEEDS])
    what = ", ".join(f"{name} {value}" for name, value in world.eased.items())
    found.append(_below("room", f"a tenth fewer errors with {what}", eased, (1 - BY) * error))
    return found


def _fails(world: SmallWorld, errors: Errors, simple: Mapping[str, float]) -> Premise:
    """Return the premise that half of the runs at the usual rate fail: no better than the best simple predictor."""
    level = min(simple.values())
    failed = [(errors.of(Run("baseline", world.usual_rate, seed)) or 0.0) >= level for seed in SEEDS]
    return _above("symptom", "share of runs at the usual rate that fail", sum(failed) / len(failed), FAIL, equal=True)


def _mean(errors: Errors, runs: list[Run], split: str = "validation") -> float:
    value = errors.mean(runs, split)
    if value is None:
        raise ValueError(f"premises need {len(runs)} runs, and some were not made")
    return value


def _below(name: str, says: str, figure: float, level: float) -> Premise:
    return Premise(name, says, figure, level, figure < level)


def _above(name: str, says: str, figure: float, level: float, *, equal: bool = False) -> Premise:
    return Premise(name, says, figure, level, figure > level or (equal and figure == level))
