"""The result of a comparison in one to three sentences, divergence first."""

from __future__ import annotations

from headwise_verdict.files.errors import count
from headwise_verdict.pages.formats import p_value, unit_named
from headwise_verdict.results.analysis_record import Analysis, ArmAnalysis


def answer(analysis: Analysis) -> str:
    """Return the result of the study in words, built from its verdicts on the primary outcome."""
    by_verdict: dict[str, list[str]] = {}
    for arm in analysis.compared:
        by_verdict.setdefault(arm.differences[analysis.primary].verdict, []).append(arm.label)
    total, seeds = sum(map(len, by_verdict.values())), count(len(analysis.seeds), "seed")
    if not total:
        return f"Only {analysis.baseline} was run, with {seeds}: there is nothing to compare."
    start = f"{'In' if analysis.complete else 'So far, in'} {analysis.metric.label}, with {seeds}"
    subject = f"any of {spelled(total)} arms" if total > 1 else next(iter(by_verdict.values()))[0]
    if len(by_verdict.get("no evidence", [])) == total:
        text = f"{start}, there is no evidence that {subject} differs from the baseline{_power(analysis)}."
    elif len(by_verdict.get("undecided", [])) == total:
        text = f"{start}, it cannot be decided whether {subject} differs from the baseline."
    else:
        text = f"{start}: {'; '.join(_clauses(by_verdict, analysis))}."
    return " ".join([*divergence_sentences(analysis), text])


def _clauses(by_verdict: dict[str, list[str]], analysis: Analysis) -> list[str]:
    clauses = []
    phrases = {verdict: f"{verdict} than the baseline" for verdict in ("better", "worse", "higher", "lower")}
    phrases["equivalent"] = f"equivalent to the baseline within ±{_figure(analysis, analysis.margin)}"
    for verdict, words in phrases.items():
        labels = by_verdict.get(verdict, [])
        if labels:
            clauses.append(f"{named(labels)} {'is' if len(labels) == 1 else 'are'} {words}")
    unknown = {"no evidence": "there is no evidence of a difference for", "undecided": "it cannot be decided for"}
    for verdict, words in unknown.items():
        labels = by_verdict.get(verdict, [])
        if labels:
            clauses.append(f"{words} {listed(labels) if len(labels) <= 2 else f'{spelled(len(labels))} arms'}")
    return clauses


def _power(analysis: Analysis) -> str:
    """Return the difference that the study could have detected in every arm: the largest detectable one."""
    detectable = [arm.differences[analysis.primary].detectable for arm in analysis.compared]
    sizes = [size for size in detectable if size is not None]
    if not sizes:
        return ""
    return f" (80\u00a0% power to detect {_figure(analysis, max(sizes))})"


def _figure(analysis: Analysis, value: float | None) -> str:
    unit = unit_named(analysis.metric.unit)
    return f"{unit.number(value)} {unit.difference}".rstrip()


def divergence_sentences(analysis: Analysis) -> list[str]:
    """Return one sentence per arm that diverged, or a single sentence when more than three did."""
    diverged = [arm for arm in analysis.arms if arm.runs.diverged]
    tested = [arm for arm in diverged if arm.divergence]
    base = next(arm for arm in analysis.arms if arm.label == analysis.baseline)
    if len(diverged) > 3:
        counts = sum(len(arm.runs.diverged) for arm in diverged)
        decided = [arm for arm in analysis.compared if arm.divergence and arm.divergence.verdict != "no evidence"]
        words = [f"{arm.label} {arm.divergence.verdict} than the baseline" for arm in decided if arm.divergence]
        start = f"{counts} runs of {len(diverged)} arms diverged"
        return [
            f"{start}: {'; '.join(words)}." if words else f"{start}, no arm demonstrably more often than the baseline."
        ]
    if not tested:
        return [_divergence(arm, analysis) for arm in diverged]
    return [_divergence(arm, analysis, len(base.runs.diverged)) for arm in tested]


def _divergence(arm: ArmAnalysis, analysis: Analysis, base: int = 0) -> str:
    start = f"{arm.label} diverged in {len(arm.runs.diverged)} of {len(analysis.seeds)} seeds"
    if arm.divergence is None:
        return f"{start}."
    p = p_value(arm.divergence.p_corrected)
    decided = arm.divergence.verdict if arm.divergence.verdict != "no evidence" else "no evidence of a difference"
    return f"{start}, {analysis.baseline} in {base} ({decided}, exact p {'' if p and p.startswith('<') else '= '}{p})."


NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def spelled(number: int) -> str:
    """Return a number in words up to twelve, else in digits."""
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def named(labels: list[str]) -> str:
    """Return up to three names as a list, or the number of arms."""
    return listed(labels) if len(labels) <= 3 else f"{spelled(len(labels))} arms"


def listed(names: list[str]) -> str:
    """Return names as a list in words: "A, B and C"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
