"""Premises that many studies share: what must be true for a claim to mean anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from headwise.results.records import DIVERGED, MOVED, MOVED_RELATIVE, ClaimTest, Premise


def majority(train: Sequence[int], test: Sequence[int]) -> tuple[float, float]:
    """Return accuracy and loss (nats) on `test` of the trivial predictor: the most frequent class of `train`, and their
    shares.

    Of words or letters these are the figures of the unigram model. A class that `train` lacks counts as seen once.
    """
    seen, asked = Counter(train), Counter(test)
    share = {one: max(seen[one], 1) / len(train) for one in asked}
    most = max(seen, key=lambda one: seen[one])
    return asked[most] / len(test), -sum(many * math.log(share[one]) for one, many in asked.items()) / len(test)


def learned(outcome: str, trivial: float, by: float, *, arm: str = "baseline", lower: bool = False) -> Premise:
    """State that an arm is better than the trivial predictor by a named amount; `lower` of errors and losses."""
    level = trivial - by if lower else trivial + by
    text = f"{_named(arm)} learned: better than the trivial predictor's {trivial:.4g} in {outcome} by {by:.4g}"
    test = ClaimTest(arm=arm, outcome=outcome, says="lower" if lower else "higher", level=level)
    return Premise(name="learned", text=text, tests=(test,))


def memorised(outcome: str = "train/accuracy", share: float = 0.99) -> Premise:
    """State that the plain model knows its training examples."""
    test = ClaimTest(arm="baseline", outcome=outcome, says="higher", level=share)
    return Premise(name="memorised", text=f"The plain model memorised: {outcome} above {share:.0%}", tests=(test,))


def failure_arose(*arms: str, share: float = 0.5) -> Premise:
    """State that of the plain runs, or of each of the arms named, at least this share diverged."""
    named = arms or ("baseline",)
    tests = tuple(ClaimTest(arm=arm, outcome=DIVERGED, says="higher", level=share) for arm in named)
    return Premise(
        name="failure arose", text=f"At least {share:.0%} of the runs without the remedy diverged", tests=tests
    )


def better_than_untrained(
    outcome: str, untrained: float | str, by: float = 0.0, *, arm: str = "baseline", lower: bool = False
) -> Premise:
    """State that the trained model beats the untrained one: a figure, or the arm that trains at a learning rate of
    0; `lower` of errors and losses.

    Raises:
        ValueError: for `by` beside an arm, against which a direction alone is tested.
    """
    if by and isinstance(untrained, str):
        raise ValueError(f"by={by:.4g} is of a figure: an arm, here {untrained!r}, is beaten or not. Leave `by` out.")
    who = "The trained model" if arm == "baseline" else f"{arm}, trained,"
    text = f"{who} beats the untrained one in {outcome}" + (f" by {by:.4g}" if by else "")
    held = (
        {"against": untrained} if isinstance(untrained, str) else {"level": untrained - by if lower else untrained + by}
    )
    says = "lower" if lower else "higher"
    test = ClaimTest.model_validate({"arm": arm, "outcome": outcome, "says": says, **held})
    return Premise(name="better than untrained", text=text, tests=(test,))


def parameters_moved(arm: str, by: float = 0.01, *, relative: bool = False) -> Premise:
    """State that the parameters which an arm's methods brought along moved from their start by more than `by`, a root
    mean square; `relative` to that of their start, which parameters that start at 0 have not."""
    text = f"The own parameters of {arm} moved by more than {by:.4g}" + (" of their start" if relative else "")
    test = ClaimTest(arm=arm, outcome=MOVED_RELATIVE if relative else MOVED, says="higher", level=by)
    return Premise(name=f"{arm} moved", text=text, tests=(test,))


def _named(arm: str) -> str:
    return "The plain model" if arm == "baseline" else arm
