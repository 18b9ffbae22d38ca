"""Compare every arm of a study with its baseline in one outcome: paired differences, joint tests, intervals, verdicts.

Every difference is taken within a seed (arm − baseline), because within a seed all arms share initial weights and data order.
"""

from __future__ import annotations

from typing import Any

from headwise.results.analysis_record import Difference
from headwise.results.answer import count
from headwise.results.equivalence import Equivalence, equivalence
from headwise.results.folder import StudyFolder
from headwise.results.intervals import ALPHA
from headwise.results.joint_flips import EXACT_UP_TO, joint_test, smallest_p
from headwise.results.power import detectable_effect, pairing_gain
from headwise.results.simultaneous import Bounds, JointIntervals


def paired_differences(
    study: StudyFolder, name: str, higher_is_better: bool | None, margin: float | None = None
) -> dict[str, Difference]:
    """Return, per arm other than the baseline, its paired difference in the outcome `name`, with everything that is said of it.

    Seeds without a figure of either run are no pair; they are listed under `excluded`. Without a good direction
    (`higher_is_better` None: train figures, gaps, heads) the verdict is "higher" or "lower". All arms of the study are one family.
    """
    import numpy as np

    others = [arm for arm in study.arms if arm != study.baseline]
    base = {seed: study.figure(study.baseline, seed, name) for seed in study.seeds}
    ours = {arm: {seed: study.figure(arm, seed, name) for seed in study.seeds} for arm in others}
    if not others or not study.seeds:
        return {}
    rows = [[_minus(ours[arm][seed], base[seed]) for arm in others] for seed in study.seeds]
    table = np.array(rows, dtype=float)
    tests, intervals = joint_test(table), JointIntervals(table)
    bounds, margins = intervals.bounds(ALPHA), equivalence(intervals, margin)
    found = {}
    for at, arm in enumerate(others):
        pairs = {seed: float(table[row, at]) for row, seed in enumerate(study.seeds) if np.isfinite(table[row, at])}
        entry: dict[str, Any] = {
            "by_seed": {str(seed): value for seed, value in pairs.items()},
            "excluded": [seed for seed in study.seeds if seed not in pairs],
            "failed": [seed for seed in pairs if _diverged(study, (arm, study.baseline), seed)],
            "p": tests.alone[at] if pairs else None,
            "p_corrected": tests.corrected[at] if pairs else None,
            "smallest_p": smallest_p(len(pairs)),
            "exact": len(study.seeds) <= EXACT_UP_TO,
            "pairing": pairing_gain([ours[arm][seed] for seed in pairs], [base[seed] for seed in pairs]),  # type: ignore[misc]
        }
        entry |= _spread(list(pairs.values()), bounds[at], float(intervals.errors()[at]))
        entry |= _margin(margins[at], margin)
        entry |= _verdict(entry, higher_is_better, margins[at].equivalent)
        found[arm] = Difference(**entry)
    return found


def _minus(one: float | None, other: float | None) -> float:
    return float("nan") if one is None or other is None else one - other


def _diverged(study: StudyFolder, arms: tuple[str, str], seed: int) -> bool:
    return any(run.status == "diverged" for arm in arms if (run := study.runs.get((arm, seed))))


def _spread(pairs: list[float], bounds: Bounds, error: float) -> dict[str, Any]:
    """Return the mean, its interval, and what would have been seen: the interval's half width says what |t| was asked for."""
    import statistics

    found: dict[str, Any] = {"mean": statistics.fmean(pairs) if pairs else None, "n": len(pairs)}
    found |= {"low": bounds.low, "high": bounds.high, "how": bounds.how or None, "detectable": None}
    if bounds.low is None or bounds.high is None or error == 0 or bounds.high == bounds.low:
        return found
    critical = (bounds.high - bounds.low) / 2 / error
    return found | {"detectable": detectable_effect(error * len(pairs) ** 0.5, len(pairs), critical)}


def _margin(found: Equivalence, margin: float | None) -> dict[str, Any]:
    return {"within": found.within, "p_equivalent": found.p if margin is not None else None}


def _verdict(entry: dict[str, Any], higher_is_better: bool | None, equivalent: bool) -> dict[str, str]:
    if entry["n"] == 0:
        return {"verdict": "undecided", "verdict_text": "no pair of finished runs"}
    if entry["smallest_p"] >= ALPHA or entry["low"] is None:
        text = f"cannot be decided with {count(entry['n'], 'seed')} (smallest possible p {entry['smallest_p']:.2g})"
        return {"verdict": "undecided", "verdict_text": text}
    if entry["p_corrected"] < ALPHA and (entry["low"] > 0 or entry["high"] < 0):
        higher = entry["mean"] > 0
        verdict = (
            ("lower", "higher")[higher] if higher_is_better is None else ("worse", "better")[higher == higher_is_better]
        )
        return {"verdict": verdict, "verdict_text": f"{verdict} (by less than the margin)" if equivalent else verdict}
    verdict, why = "equivalent" if equivalent else "no evidence", ""
    if all(value == 0 for value in entry["by_seed"].values()):
        why = " (every difference is 0)"
    elif entry["p_corrected"] < ALPHA:
        why = " (the joint interval holds 0)"
    return {"verdict": verdict, "verdict_text": verdict + why}
