"""The decision about a change after each seed: accept, reject, equivalent, go on, or undecided within the budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

from headwise_verdict.judging.evidence import Sample, autocorrelation, e_value, half_width, interval, paired

ACCEPT, REJECT, EQUIVALENT, GO_ON, UNDECIDED = "accept", "reject", "equivalent", "go on", "undecided"
# the exit code of each answer
CODES = {ACCEPT: 0, REJECT: 1, EQUIVALENT: 2, GO_ON: 3, UNDECIDED: 4}
# how many differences, and how close in proportion to their mean, are no independent pairs
FEWEST_ALIKE, ALIKE = 3, 1e-9
# further seeds beyond which a forecast says only that it takes more
FORESEEN = 1000


@dataclass(frozen=True)
class Rule:
    """What is asked of the differences, candidate minus baseline, fixed before the first look.

    Attributes:
        margin: in the unit of the metric; differences within it count as none. 0: no answer is "equivalent".
        alpha: probability of a wrong answer over all looks together.
        budget: the most pairs of runs; None: no limit.
        higher: whether a higher metric is better.
    """

    margin: float = 0.0
    alpha: float = 0.05
    budget: int | None = None
    higher: bool = False

    def __post_init__(self) -> None:
        for name in ("margin", "alpha", *(["budget"] if self.budget is not None else [])):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral if name == "budget" else Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise ValueError(f"margin must be a number of at least 0, got {self.margin!r}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha!r}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget must be at least 1, got {self.budget!r}")


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
    evidence = max(map(e_value, samples))
    answer = _answer(low, high, rule)
    more = None if answer != GO_ON else _more(last, rule)
    if answer == GO_ON and rule.budget is not None and pairs >= rule.budget:
        answer = UNDECIDED
    means = tuple(sample.mean for sample in samples)
    return Decision(answer, last.mean, low, high, pairs, evidence, more, rule, means=means)


def of_differences(differences: Sequence[float], rule: Rule) -> Decision:
    """Return the decision after these differences, looking after each."""
    samples = [paired(differences[:count]) for count in range(1, len(differences) + 1)]
    return decide(samples, len(differences), rule).noted(*order_notes(differences))


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

    Example:
        >>> from headwise_verdict.judging.decision import Rule, judge
        >>> judge([-0.012, -0.009, -0.014, -0.011, -0.010, -0.013], Rule(margin=0.002)).answer
        'accept'
    """
    rule = rule or Rule()
    seen: list[float] = []
    samples: list[Sample] = []
    decision = None
    for number, difference in enumerate(differences, 1):
        if not math.isfinite(difference):
            raise ValueError(
                f"pair {number} has the difference {difference}: a run that diverged has no figure. Count it as the "
                "metric of a model that has learned nothing, or judge the share of runs that diverge."
            )
        seen.append(difference)
        samples.append(paired(seen))
        decision = decide(samples, number, rule)
        if decision.answer != GO_ON:
            break
    if decision is None:
        raise ValueError("there is no pair of runs to judge")
    return decision.noted(*order_notes(seen))


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
    for more in range(1, FORESEEN):
        then = replace(last, size=last.size + more, freedom=last.freedom + more)
        half = half_width(then, rule.alpha)
        if _answer(last.mean - half, last.mean + half, rule) != GO_ON:
            return more
    return None
