"""Put the tests of a claim into words; many tests of one kind become one sentence with counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwise.results.claim_record import JudgedTest, Verdict

# so many tests of the same two arms are told one by one
TOLD_APART = 4


def figures_in_words(tests: list[JudgedTest]) -> str:
    """Return what was seen in all tests."""
    return "; ".join(words for group in _groups(tests) for words in _figures(group) if words)


def reasons_in_words(tests: list[JudgedTest], verdict: Verdict) -> str:
    """Return why tests have this verdict, naming the test where there are several."""
    if len(tests) == 1:
        return tests[0].why if tests[0].verdict == verdict else ""
    return "; ".join(dict.fromkeys(words for group in _groups(tests) for words in _reasons(group, verdict)))


def margins_in_words(tests: list[JudgedTest]) -> str:
    """Return the margins within which tests show no effect."""
    return " and ".join(
        dict.fromkeys(test.why.removeprefix("within ") for test in tests if test.verdict == "no effect")
    )


def _groups(tests: list[JudgedTest]) -> Iterator[list[JudgedTest]]:
    """Yield the tests that ask the same of the same two arms in many outcomes together, all others alone."""
    groups: dict[tuple[str, str, str], list[JudgedTest]] = {}
    for test in tests:
        groups.setdefault((test.arm, test.against, test.says), []).append(test)
    for group in groups.values():
        yield from [group] if len(group) > TOLD_APART else ([test] for test in group)


def _figures(group: list[JudgedTest]) -> Iterable[str]:
    if len(group) == 1:
        return [group[0].ours]
    lower = sum(1 for test in group if test.high is not None and test.high < 0)
    higher = sum(1 for test in group if test.low is not None and test.low > 0)
    first = group[0]
    against = f" against {first.against}" if first.against else ""
    counts = f"lower in {lower}, higher in {higher}, open in {len(group) - lower - higher}"
    return [f"{len(group)} outcomes{_family(group)} of {first.arm}{against}: {counts}{_between(group)}"]


def _family(group: list[JudgedTest]) -> str:
    """Name the statistic that all outcomes of a group are of, where they are of one."""
    names = {test.outcome.split("/")[1] if test.outcome.startswith("heads/") else "" for test in group}
    return f" in {name.replace('_', ' ')}" if len(names) == 1 and (name := names.pop()) else ""


def _between(group: list[JudgedTest]) -> str:
    """Say between which means the differences lie, where all are of one statistic, and so in one unit."""
    means = [test.mean for test in group if test.mean is not None]
    return (
        f"; mean differences from {min(means):+.3g} to {max(means):+.3g}".replace("-", "−")
        if means and _family(group)
        else ""
    )


def _reasons(group: list[JudgedTest], verdict: Verdict) -> Iterable[str]:
    found = [test for test in group if test.verdict == verdict and test.why]
    if len(group) == 1 or not found:
        return [f"{test.arm} in {test.outcome}: {test.why}" for test in found]
    kinds: dict[str, int] = {}
    for test in found:
        kind = test.why.partition(";")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    said = ", ".join(f"{kind} in {times} of {len(group)} outcomes" for kind, times in kinds.items())
    needed = [test.seeds_needed for test in found]
    most = None if None in needed else max(seeds for seeds in needed if seeds is not None)
    many = f"; up to {most:,} seeds would be needed" if most else ""
    return [f"{group[0].arm}: {said}{many}"]
