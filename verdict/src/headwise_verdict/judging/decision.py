"""The decision about a change after each seed: accept, reject, equivalent, go on, or undecided within the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

from headwise_verdict.judging.bounded import Bets
from headwise_verdict.judging.evidence import FORESEEN, Sample, autocorrelation, e_value, further, interval, paired

ACCEPT, REJECT, EQUIVALENT, GO_ON, UNDECIDED = "accept", "reject", "equivalent", "go on", "undecided"
# the exit code of each answer
CODES = {ACCEPT: 0, REJECT: 1, EQUIVALENT: 2, GO_ON: 3, UNDECIDED: 4}
# how many differences, and how close in proportion to their mean, are no independent pairs
FEWEST_ALIKE, ALIKE = 3, 1e-9


@dataclass(frozen=True)
class Rule:
    """What is asked of the differences, candidate minus baseline, fixed before the first look.

    Attributes:
        margin: in the unit of the metric; differences within it count as none. 0: no answer is "equivalent".
        alpha: probability of a wrong answer over all looks together.
        budget: the most pairs of runs; None: no limit.
        higher: whether a higher metric is better.
        bound: largest size of a difference, in the unit of the metric: their noise may then have any distribution.
            None: it is normal.
    """

    margin: float = 0.0
    alpha: float = 0.05
    budget: int | None = None
    higher: bool = False
    bound: float | None = None

    def __post_init__(self) -> None:
        optional = [name for name in ("budget", "bound") if getattr(self, name) is not None]
        for name in ("margin", "alpha", *optional):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral if name == "budget" else Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise ValueError(f"margin must be a number of at least 0, got {self.margin!r}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha!r}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget must be at least 1, got {self.budget!r}")
        if self.bound is not None and not self.margin < self.bound < math.inf:
            raise ValueError(
                f"bound must be a number above the margin, {self.margin:g}, got {self.bound!r}: it is the largest "
                "difference that two runs can have"
            )


@dataclass(frozen=True)
class Decision:
    """The answer after the differences so far.

    Attributes:
        answer: accept, reject, equivalent, go on or undecided.
        mean: of the differences, candidate minus baseline.
        low, high: the confidence sequence, valid at every look; infinite while the spread is unknown.
        pairs: differences so far.
        evidence: the e-value against no difference; it reaches 1/alpha with probability alpha if there is none.
        more: pairs that the answer would take if mean and spread stay; None if it has been given, or is out of sight.
        notes: what limits the answer.
        means: the mean after each look.
    """

    answer: str
    mean: float
    low: float
    high: float
    pairs: int
    evidence: float
    more: int | None
    rule: Rule
    notes: tuple[str, ...] = field(default=())
    means: tuple[float, ...] = field(default=(), repr=False)

    @property
    def code(self) -> int:
        """Return the exit code: 0 accept, 1 reject, 2 equivalent, 3 go on, 4 undecided within the budget."""
        return CODES[self.answer]

    def noted(self, *notes: str) -> Decision:
        """Return the decision with more notes."""
        return replace(self, notes=(*self.notes, *notes))


def decide(samples: Sequence[Sample], pairs: int, rule: Rule) -> Decision:
    """Return the decision after the last of the samples, one for each look."""
    last = samples[-1]
    low, high = interval(samples, rule.alpha)
    means = tuple(sample.mean for sample in samples)
    return _decided(low, high, max(map(e_value, samples)), pairs, rule, means, lambda: _more(last, rule))


def _decided(
    low: float,
    high: float,
    evidence: float,
    pairs: int,
    rule: Rule,
    means: tuple[float, ...],
    forecast: Callable[[], int | None],
) -> Decision:
    answer = _answer(low, high, rule)
    more = forecast() if answer == GO_ON else None
    if answer == GO_ON and rule.budget is not None and pairs >= rule.budget:
        answer = UNDECIDED
    return Decision(answer, means[-1], low, high, pairs, evidence, more, rule, means=means)


class Looks:
    """The differences so far, read after each of them."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.seen: list[float] = []
        self._samples: list[Sample] = []
        self._bets = None if rule.bound is None else Bets(rule.bound, rule.alpha)

    def add(self, difference: float) -> None:
        """Look at one more difference; raise StudyError if it is larger than the rule's bound."""
        if self._bets is not None:
            self._bets.add(difference)
        self.seen.append(difference)
        self._samples.append(paired(self.seen))

    def decision(self) -> Decision:
        """Return the decision after the last look."""
        bets, pairs = self._bets, len(self.seen)
        if bets is None:
            return decide(self._samples, pairs, self.rule)
        means = tuple(sample.mean for sample in self._samples)
        return _decided(
            bets.low, bets.high, bets.evidence, pairs, self.rule, means, lambda: _more_bets(bets, self.rule)
        )


def of_differences(differences: Sequence[float], rule: Rule) -> Decision:
    """Return the decision after these differences, looking after each."""
    looks = Looks(rule)
    for difference in differences:
        looks.add(difference)
    return looks.decision().noted(*order_notes(differences))


def order_notes(differences: Sequence[float]) -> list[str]:
    """Return the note that differences are all the same, or depend on those before them, if they do."""
    mean = math.fsum(differences) / len(differences)
    if len(differences) >= FEWEST_ALIKE and all(abs(d - mean) <= ALIKE * abs(mean) for d in differences):
        return [
            f"all {len(differences)} differences are {mean:.4g}: seeds that change nothing repeat one pair, and "
            "prove no more than one. Do both runs of a pair read their seed?"
        ]
    found = autocorrelation(differences)
    if found is None:
        return []
    return [
        f"neighbouring differences are alike (autocorrelation {found:.2f}): wrong answers are more likely than alpha. "
        "Draw at random, for each pair, which of its two runs comes first, or on which machine each runs"
    ]


def judge(differences: Iterable[float], rule: Rule | None = None) -> Decision:
    """Return the decision about a candidate after its first pairs of runs, each pair with one seed.

    Differences after the one that decides are not read: an iterator that trains may be passed, and stops early.

    Args:
        differences: metric of the candidate minus metric of the baseline, pair by pair, in the order of the runs.
        rule: what is asked; None: whether a lower metric is shown, at alpha 0.05.

    Raises:
        ValueError: if there is no difference, or one is not finite.
        StudyError: if one is larger than the rule's bound.

    Example:
        >>> from headwise_verdict.judging.decision import Rule, judge
        >>> judge([-0.012, -0.009, -0.014, -0.011, -0.010, -0.013], Rule(margin=0.002)).answer
        'accept'
    """
    rule = rule or Rule()
    looks = Looks(rule)
    decision = None
    for number, difference in enumerate(differences, 1):
        if not math.isfinite(difference):
            raise ValueError(
                f"pair {number} has the difference {difference}: a run that diverged has no figure. Count it as the "
                "metric of a model that has learned nothing, or judge the share of runs that diverge."
            )
        looks.add(difference)
        decision = looks.decision()
        if decision.answer != GO_ON:
            break
    if decision is None:
        raise ValueError("there is no pair of runs to judge")
    return decision.noted(*order_notes(looks.seen))


def _answer(low: float, high: float, rule: Rule) -> str:
    if -rule.margin < low and high < rule.margin:
        return EQUIVALENT
    better, worse = (low > 0, high < 0) if rule.higher else (high < 0, low > 0)
    return ACCEPT if better else REJECT if worse else GO_ON


def _more(last: Sample, rule: Rule) -> int | None:
    """Return the further pairs after which mean and spread, if they stay, decide; None beyond what is foreseen."""
    if last.freedom < 1:
        # the fewest that any differences take
        last = replace(last, spread=0.0)
    return further(last, rule.alpha, lambda low, high: _answer(low, high, rule) != GO_ON)


def _more_bets(bets: Bets, rule: Rule) -> int | None:
    """Return the further pairs, like those before, after which the bets decide; None beyond what is foreseen."""
    unequal = min(bets.more(0.0, FORESEEN), bets.more(0.0, FORESEEN, up=False))
    within = max(bets.more(-rule.margin, FORESEEN), bets.more(rule.margin, FORESEEN, up=False))
    more = min(unequal, within) if rule.margin else unequal
    return more if more < FORESEEN else None
