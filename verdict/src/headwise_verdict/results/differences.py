"""Paired differences of every arm from the baseline, and their verdict: better, worse, equivalent, no evidence.

Every difference is arm − baseline within a seed, because within a seed all arms share initial weights and data order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwise_verdict.files.errors import count
from headwise_verdict.results.analysis_record import Difference
from headwise_verdict.results.folder import StudyFolder
from headwise_verdict.results.intervals import (
    ALPHA,
    EXACT_UP_TO,
    Bounds,
    Equivalence,
    JointIntervals,
    equivalence,
    smallest_p,
)
from headwise_verdict.results.joint_flips import joint_test, seeds_for_a_verdict
from headwise_verdict.results.power import detectable_effect, pairing_gain

if TYPE_CHECKING:
    from headwise_verdict.results.joint_flips import Table


DATA = "data/"
# an arm equal to the baseline but with its own random draws, so its evidence differs on purpose
CONTROL = "same"


def why_no_pair(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return how the evidence of two runs of a seed differs; "" if it agrees, or if a run recorded none."""
    differences = []
    if ours.get("weights", "") != theirs.get("weights", "") and "weights" in ours and "weights" in theirs:
        differences.append("their initial weights differ")
    shared = sorted(int(name.removeprefix(DATA)) for name in ours.keys() & theirs.keys() if name.startswith(DATA))
    different = [count for count in shared if ours[f"{DATA}{count}"] != theirs[f"{DATA}{count}"]]
    if different:
        first = different[0]
        differences.append(
            "their first batches differ"
            if first == 1
            else f"the order of their data differs within the first {first} batches"
        )
    return " and ".join(differences)


def not_paired(study: StudyFolder) -> dict[str, str]:
    """Return the arms that are not paired with the baseline, each with the reason from the first seed that shows it."""
    reasons: dict[str, str] = {}
    for arm in study.arms:
        for seed in study.seeds if arm != CONTROL else ():
            runs = [study.runs.get((label, seed)) for label in (study.baseline, arm)]
            base, own = (run.result if run is not None else None for run in runs)
            if base is not None and own is not None and (why := why_no_pair(base.evidence, own.evidence)):
                reasons.setdefault(arm, f"seed {seed}: {why}")
    return reasons


def without_evidence(study: StudyFolder) -> bool:
    """Return whether a script's runs recorded no evidence of weights or data, so that their pairing is unverified."""
    return study.of_script and any(not run.result.evidence for run in study.runs.values() if run.result)


def paired_differences(
    study: StudyFolder, name: str, higher_is_better: bool | None, margin: float | None = None
) -> dict[str, Difference]:
    """Return the paired difference in the outcome `name`, with its tests and verdict, of every arm but the baseline.

    Seeds in which either run has no figure form no pair; they are listed under `excluded`. Without a good direction
    (`higher_is_better` None: train figures, gaps, heads) the verdict is "higher" or "lower". All arms of the study form
    one family.
    """
    import numpy as np

    others = [arm for arm in study.arms if arm != study.baseline]
    base = {seed: study.figure(study.baseline, seed, name) for seed in study.seeds}
    ours = {arm: {seed: study.figure(arm, seed, name) for seed in study.seeds} for arm in others}
    if not others or not study.seeds:
        return {}
    copies = without_a_verdict(study)
    unpaired = {arm: why for arm, why in not_paired(study).items() if arm not in copies}
    rows = [[_minus(ours[arm][seed], base[seed]) for arm in others] for seed in study.seeds]
    table = np.array(rows, dtype=float)
    table[:, [arm in unpaired or arm in copies for arm in others]] = math.nan
    # the arms that are not paired have their shares of the error, which the paired ones leave to them
    alone, share = joint_test(table).alone, 1 - len(unpaired) / len(others)
    judged = _judged(table, margin, share)
    differences = {}
    for at, arm in enumerate(others):
        if arm in copies:
            differences[arm] = _of_copies(study.seeds, [row[at] for row in rows], copies[arm])
            continue
        if arm in unpaired:
            differences[arm] = _unpaired(ours[arm], base, len(others), higher_is_better)
            continue
        bounds, p, error, within = judged[at]
        pairs = {seed: float(table[row, at]) for row, seed in enumerate(study.seeds) if np.isfinite(table[row, at])}
        fields: dict[str, Any] = {
            "by_seed": {str(seed): value for seed, value in pairs.items()},
            "excluded": [seed for seed in study.seeds if seed not in pairs],
            "failed": [seed for seed in pairs if _diverged(study, (arm, study.baseline), seed)],
            "p": alone[at] if pairs else None,
            "p_corrected": p if pairs else None,
            "smallest_p": min(1.0, smallest_p(len(pairs)) / share),
            "exact": len(study.seeds) <= EXACT_UP_TO,
            "pairing": pairing_gain([ours[arm][seed] for seed in pairs], [base[seed] for seed in pairs]),  # type: ignore[misc]
        }
        fields |= _spread(list(pairs.values()), bounds, error)
        fields |= {"within": within.within, "p_equivalent": within.p if margin is not None else None}
        fields |= _verdict(fields, higher_is_better, within.equivalent)
        differences[arm] = Difference(**fields)
    return differences


def _judged(
    table: Table, margin: float | None, share: float = 1.0
) -> dict[int, tuple[Bounds, float, float, Equivalence]]:
    """Return interval, its p, standard error and equivalence by column, judged together with a share of the error."""
    if not share:
        return {}
    intervals = JointIntervals(table)
    p = [min(1.0, one / share) for one in intervals.p_zero()]
    equal = equivalence(intervals, margin, ALPHA * share)
    return dict(enumerate(zip(intervals.bounds(ALPHA * share), p, intervals.errors().tolist(), equal)))


def _unpaired(
    ours: dict[int, float | None], base: dict[int, float | None], arms: int, higher_is_better: bool | None
) -> Difference:
    """Return the difference of an arm that is not paired with the baseline, from the means alone."""
    values, others = ([value for value in figures.values() if value is not None] for figures in (ours, base))
    fields: dict[str, Any] = {"by_seed": {}, "smallest_p": smallest_p(min(len(values), len(others))), "exact": False}
    fields |= unpaired_difference(values, others, arms)
    fields |= {
        "excluded": [seed for seed, value in ours.items() if value is None or base[seed] is None],
        "paired": False,
    }
    least = seeds_for_a_verdict(ALPHA)
    if fields["p_corrected"] is None or fields["n"] < least:
        few = f"not paired, and cannot be decided with {count(fields['n'], 'seed')}: {least} are the fewest"
        text = few if fields["n"] else "no figure of finished runs"
        return Difference(**fields, verdict="undecided", verdict_text=text)
    verdict = _verdict(fields | {"by_seed": {"": fields["mean"]}}, higher_is_better, False)
    return Difference(**fields | verdict | {"verdict_text": f"{verdict['verdict']}, not paired"})


def without_a_verdict(study: StudyFolder) -> dict[str, str]:
    """Return the arms that cannot be compared with the baseline because runs are copies, each with the reason."""
    reasons = {arm: f"{study.baseline}: {why}" for arm in study.arms if (why := study.copies.get(study.baseline))}
    return reasons | study.copies


def _of_copies(seeds: Sequence[int], row: Sequence[float], why: str) -> Difference:
    """Return the difference of an arm whose runs, or the baseline's, are copies: a mean, and no test of it."""
    import statistics

    pairs = {seed: value for seed, value in zip(seeds, row) if math.isfinite(value)}
    return Difference(
        mean=statistics.fmean(pairs.values()) if pairs else None,
        n=len(pairs),
        by_seed={str(seed): value for seed, value in pairs.items()},
        excluded=[seed for seed in seeds if seed not in pairs],
        copies=why,
        verdict_text=f"cannot be decided ({why})",
    )


def _minus(one: float | None, other: float | None) -> float:
    return float("nan") if one is None or other is None else one - other


def _diverged(study: StudyFolder, arms: tuple[str, str], seed: int) -> bool:
    return any(run.status == "diverged" for arm in arms if (run := study.runs.get((arm, seed))))


def _spread(pairs: list[float], bounds: Bounds, error: float) -> dict[str, Any]:
    """Return the fields of mean, interval and detectable difference; the interval's width gives the critical |t|."""
    import statistics

    fields: dict[str, Any] = {"mean": statistics.fmean(pairs) if pairs else None, "n": len(pairs)}
    fields |= {"low": bounds.low, "high": bounds.high, "how": bounds.how or None, "detectable": None}
    if bounds.low is None or bounds.high is None or error == 0 or bounds.high == bounds.low:
        return fields
    critical = (bounds.high - bounds.low) / 2 / error
    return fields | {"detectable": detectable_effect(error * len(pairs) ** 0.5, len(pairs), critical)}


def _verdict(fields: dict[str, Any], higher_is_better: bool | None, equivalent: bool) -> dict[str, str]:
    if fields["n"] == 0:
        return {"verdict": "undecided", "verdict_text": "no pair of finished runs"}
    if fields["smallest_p"] >= ALPHA or fields["low"] is None:
        text = f"cannot be decided with {count(fields['n'], 'seed')} (smallest possible p {fields['smallest_p']:.2g})"
        return {"verdict": "undecided", "verdict_text": text}
    if fields["p_corrected"] < ALPHA:
        higher = fields["mean"] > 0
        verdict = (
            ("lower", "higher")[higher] if higher_is_better is None else ("worse", "better")[higher == higher_is_better]
        )
        return {"verdict": verdict, "verdict_text": f"{verdict} (by less than the margin)" if equivalent else verdict}
    verdict, why = "equivalent" if equivalent else "no evidence", ""
    if all(value == 0 for value in fields["by_seed"].values()):
        why = " (every difference is 0)"
    return {"verdict": verdict, "verdict_text": verdict + why}


def unpaired_difference(ours: Sequence[float], base: Sequence[float], arms: int) -> dict[str, Any]:
    """Return mean difference, interval and p of two samples, corrected for `arms` arms."""
    import numpy as np
    from scipy import stats

    one, other = np.asarray(ours, dtype=float), np.asarray(base, dtype=float)
    n = int(min(len(one), len(other)))
    unknown = ("mean", "low", "high", "how", "p", "p_corrected")
    fields: dict[str, Any] = {"n": n} | dict.fromkeys(unknown)
    if not n:
        return fields
    mean = float(one.mean() - other.mean())
    if n < 2:
        return fields | {"mean": mean}
    parts = one.var(ddof=1) / len(one), other.var(ddof=1) / len(other)
    error = math.sqrt(sum(parts))
    if error <= 1e-12 * max(1.0, float(np.abs([*one, *other]).max())):
        p = float(mean == 0)
        how = "all values are equal"
        return fields | {"mean": mean, "low": mean, "high": mean, "how": how, "p": p, "p_corrected": p}
    degrees = error**4 / (parts[0] ** 2 / (len(one) - 1) + parts[1] ** 2 / (len(other) - 1))
    half = float(stats.t.ppf(1 - ALPHA / 2 / arms, degrees)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, degrees))
    how = "Welch's t, not paired" + (", Bonferroni" if arms > 1 else "")
    ends = {"low": mean - half, "high": mean + half}
    return fields | ends | {"mean": mean, "how": how, "p": p, "p_corrected": min(1.0, p * arms)}
