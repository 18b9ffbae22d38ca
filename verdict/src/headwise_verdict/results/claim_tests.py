"""Decisions on single tests of a claim (direction, size or equality), and the sentences that report them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from headwise_verdict.files.errors import count
from headwise_verdict.pages.formats import Unit
from headwise_verdict.results.analysis_record import JudgedTest, Verdict
from headwise_verdict.results.diverged_runs import mcnemar
from headwise_verdict.results.joint_flips import seeds_for_a_verdict
from headwise_verdict.results.power import MOST_SEEDS, POWER, power_of, power_of_sameness, seeds_needed

# up to this number, tests of the same two arms are reported one by one
REPORTED_SINGLY = 4


def figures_in_words(tests: list[JudgedTest]) -> str:
    """Return the figures of all tests in words."""
    return "; ".join(words for group in _groups(tests) for words in _figures(group) if words)


def reasons_in_words(tests: list[JudgedTest], verdict: Verdict) -> str:
    """Return why tests have this verdict, naming each test if there are several."""
    if len(tests) == 1:
        return tests[0].why if tests[0].verdict == verdict else ""
    return "; ".join(dict.fromkeys(words for group in _groups(tests) for words in _reasons(group, verdict)))


def margins_in_words(tests: list[JudgedTest], verdict: Verdict) -> str:
    """Return the margins within which tests show no effect, or of those that are too wide, in words."""
    of_these = [test.why for test in tests if test.verdict == verdict]
    if verdict == "margin too wide":
        # "the margin ±1.50 points is wider than ...", "the 0.0300 nats allowed are more than ..."
        of_these = [
            re.split(r" is wider| allowed", why)[0].removeprefix("the ").removeprefix("margin ") for why in of_these
        ]
    return " and ".join(dict.fromkeys(why.removeprefix("within ") for why in of_these))


def _groups(tests: list[JudgedTest]) -> Iterator[list[JudgedTest]]:
    """Yield tests of the same prediction and arms in many outcomes as one group, all others one by one."""
    groups: dict[tuple[str, str, str], list[JudgedTest]] = {}
    for test in tests:
        groups.setdefault((test.arm, test.against, test.says), []).append(test)
    for group in groups.values():
        yield from [group] if len(group) > REPORTED_SINGLY else ([test] for test in group)


def _figures(group: list[JudgedTest]) -> Iterable[str]:
    if len(group) == 1:
        return [group[0].ours]
    lower = sum(1 for test in group if test.high is not None and test.high + test.beyond < 0)
    higher = sum(1 for test in group if test.low is not None and test.low + test.beyond > 0)
    first = group[0]
    against = f" against {first.against}" if first.against else ""
    counts = f"lower in {lower}, higher in {higher}, open in {len(group) - lower - higher}"
    return [f"{len(group)} outcomes{_family(group)} of {first.arm}{against}: {counts}{_between(group)}"]


def _family(group: list[JudgedTest]) -> str:
    """Return " in <statistic>" if all outcomes of a group are of one statistic, else ""."""
    names = {test.outcome.split("/")[1] if test.outcome.startswith("heads/") else "" for test in group}
    return f" in {name.replace('_', ' ')}" if len(names) == 1 and (name := names.pop()) else ""


def _between(group: list[JudgedTest]) -> str:
    """Return the range of the mean differences if all are of one statistic, and so share a unit; else ""."""
    means = [test.mean + test.beyond for test in group if test.mean is not None]
    return (
        f"; mean differences from {min(means):+.3g} to {max(means):+.3g}".replace("-", "−")
        if means and _family(group)
        else ""
    )


def _reasons(group: list[JudgedTest], verdict: Verdict) -> Iterable[str]:
    matches = [test for test in group if test.verdict == verdict and test.why]
    if len(group) == 1 or not matches:
        return [f"{test.arm} in {test.outcome}: {test.why}" for test in matches]
    reasons: dict[str, int] = {}
    for test in matches:
        reason = test.why.partition(";")[0]
        reasons[reason] = reasons.get(reason, 0) + 1
    counts = ", ".join(f"{reason} in {times} of {len(group)} outcomes" for reason, times in reasons.items())
    needed = [test.seeds_needed for test in matches]
    most = None if None in needed else max(seeds for seeds in needed if seeds is not None)
    many = f"; up to {most:,} seeds would be needed" if most else ""
    return [f"{group[0].arm}: {counts}{many}"]


class Estimate(NamedTuple):
    """Estimates from one column of differences: mean, interval, interval of two one-sided tests, standard error."""

    mean: float | None
    low: float | None
    high: float | None
    # the interval of confidence 1 − 2α, which shows equality
    inner_low: float | None
    inner_high: float | None
    error: float
    pairs: int
    # of the hypothesis that the difference is 0, by the interval's own test
    p: float | None = None

    @property
    def spread(self) -> float:
        """Return the standard deviation of the differences."""
        return self.error * float(self.pairs) ** 0.5

    @property
    def critical(self) -> float:
        """Return the critical |t| of the interval."""
        return _half(self.low, self.high) / self.error if self.error else 0.0

    @property
    def inner_critical(self) -> float:
        """Return the critical |t| of each one-sided test."""
        return _half(self.inner_low, self.inner_high) / self.error if self.error else 0.0


class ClaimDecision(NamedTuple):
    """The verdict of a test with its reason, power, and the number of seeds for a power of 80 %."""

    verdict: Verdict
    why: str = ""
    power: float | None = None
    seeds: int | None = None


class Criteria(NamedTuple):
    """The criteria of a test: error rate, unit of its figures, and the published effect or margin."""

    alpha: float
    unit: Unit
    effect: float | None = None
    margin: float | None = None

    def words(self, value: float) -> str:
        """Return a figure with its unit."""
        return f"{self.unit.number(value)} {self.unit.difference}".rstrip()


def directed(estimate: Estimate, sign: int, criteria: Criteria) -> ClaimDecision:
    """Judge the claim that a difference is above (`sign` 1) or below (−1) 0."""
    if (undecidable := _undecidable(estimate, criteria)) or estimate.low is None or estimate.high is None:
        return undecidable or _few(estimate, criteria)
    low, high = (estimate.low, estimate.high) if sign > 0 else (-estimate.high, -estimate.low)
    effect = abs(criteria.effect) if criteria.effect is not None else None
    power = None if effect is None else power_to_see(effect, estimate)
    if low > 0:
        return _sized(low, high, effect, criteria, power)
    if high < 0:
        return ClaimDecision("contrary", "the difference is of the other sign", power)
    if criteria.margin is not None and _largest(estimate) < criteria.margin:
        return ClaimDecision("no effect", f"within ±{criteria.words(criteria.margin)}", power)
    return _open("the interval holds 0", estimate, effect if power is None or power < POWER else None, criteria, power)


def _sized(low: float, high: float, effect: float | None, criteria: Criteria, power: float | None) -> ClaimDecision:
    """Judge an interval on the published side of 0 by the size of the published effect."""
    # tolerance for rounding, for a difference equal to the published one
    slack = 0.0 if effect is None else 1e-9 * effect
    if effect is None or low - slack <= effect <= high + slack:
        return ClaimDecision("as published", "", power)
    verdict: Verdict = "same direction, smaller" if high < effect else "same direction, larger"
    return ClaimDecision(verdict, f"{verdict.rpartition(' ')[2]} than the published {criteria.words(effect)}", power)


def same(estimate: Estimate, criteria: Criteria) -> ClaimDecision:
    """Judge the claim that a difference is within ±margin, by two one-sided tests."""
    if (undecidable := _undecidable(estimate, criteria)) or criteria.margin is None:
        return undecidable or ClaimDecision("undecided", "no margin is declared")
    assert estimate.low is not None and estimate.high is not None
    margin, words = criteria.margin, f"±{criteria.words(criteria.margin)}"
    power = (
        1.0
        if not estimate.error
        else power_of_sameness(0.0, margin / estimate.spread, estimate.pairs, estimate.inner_critical)
    )
    if _largest(estimate) < margin:
        return ClaimDecision("as published", f"within {words}", power)
    if estimate.low > margin or estimate.high < -margin:
        return ClaimDecision("contrary", f"the interval lies outside {words}", power)
    why, mean = f"the interval crosses {words}", abs(estimate.mean or 0.0)
    if mean >= margin or not estimate.error:
        return ClaimDecision("undecided", why, power)
    needed = seeds_needed(
        lambda seeds, critical: power_of_sameness(mean / estimate.spread, margin / estimate.spread, seeds, critical),
        estimate.inner_critical,
        estimate.pairs,
        seeds_for_a_verdict(criteria.alpha),
    )
    return _with_seeds(why, needed, "to show it at the difference measured", estimate.pairs, power)


def inside(first: Sequence[Estimate], last: Sequence[Estimate], criteria: Criteria) -> ClaimDecision:
    """Judge the claim that the best value is inside an axis, from each inner value's gains over the first and last."""
    columns = [*first, *last]
    for one in columns:
        if undecidable := _undecidable(one, criteria):
            return undecidable
    if any(
        low.low is not None and high.low is not None and min(low.low, high.low) > 0 for low, high in zip(first, last)
    ):
        return ClaimDecision("as published")
    for gains, name in ((first, "first"), (last, "last")):
        if all(one.high is not None and one.high < 0 for one in gains):
            return ClaimDecision("contrary", f"the {name} value is better than every inner one")
    best = max(range(len(first)), key=lambda at: min(first[at].mean or 0.0, last[at].mean or 0.0))
    pair = first[best], last[best]
    if min(one.mean or 0.0 for one in pair) <= 0:
        return ClaimDecision("undecided", "no inner value is better than both ends in the mean")
    why = "no inner value is demonstrably better than both ends"
    # a gain that is shown already needs no more seeds
    needed = [_open("", one, None, criteria, None).seeds for one in pair if one.low is None or one.low <= 0]
    if None in needed or not needed:
        return ClaimDecision("undecided", why)
    most = max(one for one in needed if one is not None)
    words = _seeds(most if most <= MOST_SEEDS else None, "at the gains measured")
    return ClaimDecision("undecided", f"{why}; {words}", None, most)


def diverged(ours: Sequence[bool], other: Sequence[bool], sign: int, criteria: Criteria) -> tuple[ClaimDecision, float]:
    """Judge the claim that an arm diverges more (`sign` 1) or less often (−1); return McNemar's exact p too."""
    p, pairs = mcnemar(ours, other), len(ours)
    difference = sign * (sum(ours) - sum(other)) / pairs if pairs else 0.0
    effect = abs(criteria.effect) if criteria.effect is not None else None
    power = None if effect is None else _power_of_pairs(effect, pairs, criteria.alpha)
    if not pairs:
        return ClaimDecision("undecided", "no seed in which both runs ended"), p
    if p < criteria.alpha and difference:
        if difference > 0:
            return ClaimDecision("as published", "", power), p
        return ClaimDecision("contrary", "the difference is of the other sign", power), p
    margin = criteria.margin if criteria.margin is not None else effect / 2 if effect is not None else None
    if margin is not None and _share_within(ours, other, criteria.alpha) < margin:
        return ClaimDecision("no effect", f"within ±{criteria.words(margin)}", power), p
    missed = effect is not None and (power is None or power < POWER)
    size, at = (
        (effect, "at the published difference") if missed and effect else (difference, "at the difference measured")
    )
    why = "the test decides nothing"
    if size <= 0:
        return ClaimDecision("undecided", why, power), p
    return _with_seeds(why, _seeds_of_pairs(size, criteria.alpha), at, pairs, power), p


def diverged_as_often(ours: Sequence[bool], other: Sequence[bool], criteria: Criteria) -> tuple[ClaimDecision, float]:
    """Judge the claim that an arm diverges as often as another, within a margin on the share of seeds.

    Return McNemar's p too. The claim holds if the exact one-sided upper bounds on the share of seeds in which only the
    arm diverged, and on the share in which only the other did, are both below the margin.
    """
    p, pairs = mcnemar(ours, other), len(ours)
    if not pairs or criteria.margin is None:
        return ClaimDecision("undecided", "no margin is declared" if pairs else "no seed in which both runs ended"), p
    within = f"±{criteria.words(criteria.margin)}"
    if _share_within(ours, other, criteria.alpha) < criteria.margin:
        return ClaimDecision("as published", f"within {within}"), p
    if p < criteria.alpha and abs(sum(ours) - sum(other)) > criteria.margin * pairs:
        return ClaimDecision("contrary", f"the difference is larger than {within}"), p
    return ClaimDecision("undecided", f"{count(pairs, 'pair')} do not exclude a difference of {within}"), p


def _share_within(ours: Sequence[bool], other: Sequence[bool], alpha: float) -> float:
    """Return the larger of the exact one-sided bounds on the two shares of seeds in which only one run diverged."""
    from scipy import stats

    pairs = len(ours)
    counts = [sum(one and not two for one, two in zip(first, last)) for first, last in ((ours, other), (other, ours))]
    return max(
        1.0 if count == pairs else float(stats.beta.ppf(1 - alpha, count + 1, pairs - count)) for count in counts
    )


def power_to_see(effect: float, estimate: Estimate) -> float:
    """Return the probability that an effect of this size would have been detected."""
    return power_of(effect / estimate.spread, estimate.pairs, estimate.critical) if estimate.error else 1.0


def _undecidable(estimate: Estimate, criteria: Criteria) -> ClaimDecision | None:
    if estimate.pairs == 0:
        return ClaimDecision("undecided", "no pair of finished runs")
    return (
        _few(estimate, criteria)
        if estimate.pairs < seeds_for_a_verdict(criteria.alpha) or estimate.low is None
        else None
    )


def _few(estimate: Estimate, criteria: Criteria) -> ClaimDecision:
    least = seeds_for_a_verdict(criteria.alpha)
    estimable = criteria.effect is not None and estimate.error and estimate.pairs > 1
    decision = _open("", estimate, abs(criteria.effect), criteria, None) if estimable and criteria.effect else None
    needed = max(least, decision.seeds or least) if decision else least
    return ClaimDecision(
        "undecided", f"{count(estimate.pairs, 'pair')}; {_seeds(needed, 'for a verdict')}", None, needed
    )


def _open(why: str, estimate: Estimate, effect: float | None, criteria: Criteria, power: float | None) -> ClaimDecision:
    """Return an undecided verdict with the number of seeds that the published effect, else the measured one, needs."""
    size, at = (effect, "at the published effect") if effect else (abs(estimate.mean or 0.0), "at the effect measured")
    if not size or not estimate.error or not estimate.critical:
        return ClaimDecision("undecided", why, power)
    needed = seeds_needed(
        lambda seeds, critical: power_of(size / estimate.spread, seeds, critical),
        estimate.critical,
        estimate.pairs,
        seeds_for_a_verdict(criteria.alpha),
    )
    return _with_seeds(why, needed, at, estimate.pairs, power)


def _with_seeds(why: str, needed: int | None, at: str, pairs: int, power: float | None) -> ClaimDecision:
    """Return an undecided verdict with the number of seeds needed, or without where at least as many were run."""
    if needed is not None and needed <= pairs:
        at = at.removeprefix("to show it ")
        return ClaimDecision("undecided", f"{why}, although these seeds have a power of at least 80 % {at}", power)
    # where none was found, one more than the largest number reported
    seeds = MOST_SEEDS + 1 if needed is None else needed
    return ClaimDecision("undecided", f"{why}; {_seeds(needed, at)}", power, seeds)


def _seeds(needed: int | None, at: str) -> str:
    return f"{f'more than {MOST_SEEDS:,}' if needed is None else f'{needed:,}'} seeds would be needed {at}"


def _largest(estimate: Estimate) -> float:
    """Return the largest absolute value in the interval of the two one-sided tests."""
    assert estimate.inner_low is not None and estimate.inner_high is not None
    return max(abs(estimate.inner_low), abs(estimate.inner_high))


def _half(low: float | None, high: float | None) -> float:
    return 0.0 if low is None or high is None else (high - low) / 2


def _power_of_pairs(share: float, pairs: int, alpha: float) -> float:
    """Return the power of McNemar's exact test if only one arm diverges, in this share of the seeds."""
    from scipy import stats

    # the smallest number of seeds of one kind, with none of the other, that decides
    return float(stats.binom.sf(seeds_for_a_verdict(alpha) - 1, pairs, min(share, 1.0)))


def _seeds_of_pairs(share: float, alpha: float) -> int | None:
    if share <= 0:
        return None
    numbers = range(seeds_for_a_verdict(alpha), 20_000)
    return next((n for n in numbers if _power_of_pairs(share, n, alpha) >= POWER), None)
