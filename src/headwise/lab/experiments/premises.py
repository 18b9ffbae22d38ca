"""Premises shared by many studies: conditions without which a claim has no meaning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from headwise_verdict.results import ClaimTest, OutcomeNames, Premise


def majority(train: Sequence[int], test: Sequence[int]) -> tuple[float, float]:
    """Return accuracy and loss (nats) on `test` of the predictor that knows only class frequencies of `train`.

    It predicts the most frequent class, and its loss uses the frequencies. For words or letters this is the unigram
    model. A class that `train` lacks counts as seen once.
    """
    known, tested = Counter(train), Counter(test)
    share = {one: max(known[one], 1) / len(train) for one in tested}
    predicted = max(known, key=lambda one: known[one])
    return tested[predicted] / len(test), -sum(many * math.log(share[one]) for one, many in tested.items()) / len(test)


def learned(outcome: str, trivial: float, by: float, *, arm: str = "baseline", lower: bool = False) -> Premise:
    """Return the premise that an arm beats the trivial predictor by `by`; `lower` for errors and losses."""
    level = trivial - by if lower else trivial + by
    who = "The plain model" if arm == "baseline" else arm
    text = f"{who} learned: better than the trivial predictor's {trivial:.4g} in {outcome} by {by:.4g}"
    test = ClaimTest(arm=arm, outcome=outcome, says="lower" if lower else "higher", level=level)
    return Premise(name="learned", text=text, tests=(test,))


def memorised(outcome: str = "train/accuracy", share: float = 0.99) -> Premise:
    """Return the premise that the plain model knows its training examples."""
    test = ClaimTest(arm="baseline", outcome=outcome, says="higher", level=share)
    return Premise(name="memorised", text=f"The plain model memorised: {outcome} above {share:.0%}", tests=(test,))


def failure_arose(*arms: str, share: float = 0.5) -> Premise:
    """Return the premise that at least this share of the plain runs, or of each named arm's runs, diverged."""
    named = arms or ("baseline",)
    tests = tuple(ClaimTest(arm=arm, outcome=OutcomeNames.DIVERGED, says="higher", level=share) for arm in named)
    return Premise(
        name="failure arose", text=f"At least {share:.0%} of the runs without the remedy diverged", tests=tests
    )


def better_than_untrained(
    outcome: str, untrained: float | str, by: float = 0.0, *, arm: str = "baseline", lower: bool = False
) -> Premise:
    """Return the premise that the trained model beats the untrained one; `lower` for errors and losses.

    `untrained` is a figure, or the arm that trains at a learning rate of 0.

    Raises:
        ValueError: for `by` together with an arm, against which only the direction is tested.
    """
    if by and isinstance(untrained, str):
        raise ValueError(f"by={by:.4g} needs a figure for untrained, not an arm, here {untrained!r}. Leave `by` out.")
    who = "The trained model" if arm == "baseline" else f"{arm}, trained,"
    text = f"{who} beats the untrained one in {outcome}" + (f" by {by:.4g}" if by else "")
    reference = (
        {"against": untrained} if isinstance(untrained, str) else {"level": untrained - by if lower else untrained + by}
    )
    says = "lower" if lower else "higher"
    test = ClaimTest.model_validate({"arm": arm, "outcome": outcome, "says": says, **reference})
    return Premise(name="better than untrained", text=text, tests=(test,))


def parameters_moved(arm: str, by: float = 0.01, *, relative: bool = False) -> Premise:
    """Return the premise that the parameters of an arm's methods moved from their start by more than `by`.

    The distance is a root mean square; with `relative`, it is divided by that of their start, which must not be 0.
    """
    text = f"The own parameters of {arm} moved by more than {by:.4g}" + (" of their start" if relative else "")
    test = ClaimTest(
        arm=arm, outcome=OutcomeNames.MOVED_RELATIVE if relative else OutcomeNames.MOVED, says="higher", level=by
    )
    return Premise(name=f"{arm} moved", text=text, tests=(test,))
