"""Compare the methods of a study with its baseline: paired differences, exact tests, intervals, verdicts.

Every difference is taken within a seed (method − baseline), because within a seed all methods share initial weights and data order.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwise.comparing.results.answer import answer, count
from headwise.files.provenance import distinct_environments

ALPHA = 0.05
BOOTSTRAP_FROM = 20  # pairs; the percentile bootstrap of 5 pairs covers 84 %, so fewer pairs use Student's t
EXACT_UP_TO = 20  # pairs; all their 2ⁿ sign flips are counted
RESAMPLES = 99_999  # random sign flips of more pairs
COSTS = ("seconds_per_step", "peak_memory_bytes", "parameters")


def interval(values: Sequence[float], *, bootstrap_from: float = BOOTSTRAP_FROM) -> dict:
    """Return the mean of `values` with its 95 % interval: {"mean", "low", "high", "n", "interval"}.

    Student's t below `bootstrap_from` values, the BCa bootstrap from there. One value has no interval (None); none has no mean either.
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(values, dtype=float)
    found = {
        "mean": float(array.mean()) if array.size else None,
        "low": None,
        "high": None,
        "n": int(array.size),
        "interval": None,
    }
    if array.size < 2:
        return found
    if np.ptp(array) == 0:
        return found | {"low": found["mean"], "high": found["mean"], "interval": "all values are equal"}
    if array.size < bootstrap_from:
        half = float(stats.t.ppf(1 - ALPHA / 2, array.size - 1) * array.std(ddof=1) / np.sqrt(array.size))
        return found | {"low": found["mean"] - half, "high": found["mean"] + half, "interval": "Student's t"}
    rng = np.random.default_rng(0)
    drawn = stats.bootstrap((array,), np.mean, n_resamples=9_999, confidence_level=1 - ALPHA, method="BCa", rng=rng)
    low, high = drawn.confidence_interval
    return found | {"low": float(low), "high": float(high), "interval": "BCa bootstrap, 9,999 draws"}


def sign_flip(differences: Sequence[float]) -> float:
    """Return the two-sided p of a sign-flip permutation test that the mean of paired `differences` is 0.

    Exact (all 2ⁿ flips are counted) up to 20 pairs, else 99,999 random flips with a fixed seed.
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(differences, dtype=float)
    if array.size < 2:
        # The one flip of a single difference is as far from 0.
        return 1.0
    if array.size <= EXACT_UP_TO:
        sums = np.zeros(1)
        for value in array:
            sums = np.concatenate([sums + value, sums - value])
        # equal sums differ in their last digits
        return float((abs(sums) >= abs(array.sum()) - 1e-10 * abs(array).sum()).mean())
    rng = np.random.default_rng(0)
    found = stats.permutation_test(
        (array,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, batch=4096, rng=rng
    )
    return min(float(found.pvalue), 1.0)


def smallest_p(pairs: int) -> float:
    """Return the smallest two-sided p that `sign_flip` can give with this many pairs: 2/2ⁿ while it is exact."""
    return min(1.0, 2 / (2**pairs if pairs <= EXACT_UP_TO else RESAMPLES + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down procedure (Holm 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = highest
    return corrected


def paired_differences(study, metric: str, higher_is_better: bool | None) -> dict[str, dict]:
    """Return, per method other than the baseline, the paired difference in `metric` with its interval, p and verdict.

    `study` is a `headwise.comparing.results.folder.StudyFolder`. Seeds in which either run diverged or is missing are no pair; they are listed
    under "excluded". Without a good direction (`higher_is_better` None: train figures, gaps) the verdict is "higher" or "lower". Holm's correction counts every method of the study, also one that has no pair yet.
    """
    others = [method for method in study.methods if method != study.baseline]
    pairs = {method: _pairs(study, method, metric) for method in others}
    p = [sign_flip(list(pairs[m].values())) if pairs[m] else 1.0 for m in others]
    least = holm([smallest_p(len(pairs[method])) for method in others])
    found = {}
    for method, raw, corrected, possible in zip(others, p, holm(p), least):
        values = list(pairs[method].values())
        entry = interval(values) | {
            "by_seed": {str(seed): value for seed, value in pairs[method].items()},
            "excluded": [seed for seed in study.seeds if seed not in pairs[method]],
            "p": raw if values else None,
            "p_corrected": corrected if values else None,
            "smallest_p_corrected": possible,
            "exact": len(values) <= EXACT_UP_TO,
        }
        found[method] = entry | _verdict(entry, higher_is_better)
    return found


def _pairs(study, method: str, metric: str) -> dict[int, float]:
    pairs = {}
    for seed in study.seeds:
        cells = [study.runs.get((name, seed)) for name in (method, study.baseline)]
        ours, base = [run.metric(metric) if run else None for run in cells]
        if ours is not None and base is not None:
            pairs[seed] = ours - base
    return pairs


def _verdict(entry: dict, higher_is_better: bool | None) -> dict:
    if entry["n"] == 0:
        return {"verdict": "undecided", "verdict_text": "no pair of finished runs"}
    if entry["smallest_p_corrected"] >= ALPHA or entry["low"] is None:
        text = f"cannot be decided with {count(entry['n'], 'seed')} (smallest possible p {entry['smallest_p_corrected']:.2g})"
        return {"verdict": "undecided", "verdict_text": text}
    if entry["p_corrected"] < ALPHA and (entry["low"] > 0 or entry["high"] < 0):
        higher = entry["mean"] > 0
        verdict = (
            ("lower", "higher")[higher] if higher_is_better is None else ("worse", "better")[higher == higher_is_better]
        )
        return {"verdict": verdict, "verdict_text": verdict}
    same = all(value == 0 for value in entry["by_seed"].values())
    return {"verdict": "no evidence", "verdict_text": "no evidence (every difference is 0)" if same else "no evidence"}


def analyse(folder) -> dict:
    """Return the whole analysis of a study folder as a dictionary that JSON can hold.

    Keys: metric, baseline, seeds, complete, missing, damaged, answer, environments (commit, versions and hardware of the results, with their numbers of runs), and methods: per method its runs (finished, diverged, missing), the
    interval of every outcome over seeds, costs (medians over seeds), and the paired differences to the baseline per outcome.
    Accuracies in [0, 1], losses in nats, gaps train − test. Raises what `headwise.comparing.results.folder.read_study` raises.
    """
    from headwise.comparing.results.folder import read_study

    return analyse_study(read_study(folder))


def analyse_study(study) -> dict:
    """Return what `analyse` returns, for a study folder already read."""
    metric = study.study["metric"]
    names = [metric["name"], *(name for name in outcomes(metric) if name != metric["name"] and _recorded(study, name))]
    better = {name: _direction(name, metric) for name in names}
    differences = {name: paired_differences(study, name, better[name]) for name in names}
    methods = [_method(study, label, names, differences) for label in study.methods]
    missing = [{"method": method, "seed": seed} for method, seed in study.missing()]
    results = [run.result for run in study.runs.values() if run.result]
    found = {
        "metric": metric,
        "baseline": study.baseline,
        "seeds": study.seeds,
        "complete": not missing,
        "missing": missing,
        "damaged": [
            {"method": run.method, "seed": run.seed, "run": run.path.name, "files": list(run.damage)}
            for run in study.damaged()
        ],
        "higher_is_better": better,
        "methods": methods,
        "statistics": _words(len(study.methods) - 1),
        "environments": distinct_environments(results),
    }
    return found | {"answer": answer(found)}


def outcomes(metric: dict) -> list[str]:
    """Return the names of all figures that a run may record about quality: test, validation, train and gap of metric and loss."""
    kinds = dict.fromkeys([kind_of(metric["name"]), "loss"])
    return [f"{split}_{kind}" for split in ("test", "validation", "train", "gap") for kind in kinds]


def kind_of(name: str) -> str:
    """Return what a figure measures, without its split: "accuracy" of "test_accuracy"."""
    return name.partition("_")[2]


def _direction(name: str, metric: dict) -> bool | None:
    if name == metric["name"]:
        return metric["higher_is_better"]
    if name.startswith(("train_", "gap_")):
        return None
    return metric["higher_is_better"] if kind_of(name) == kind_of(metric["name"]) else False


def _recorded(study, name: str) -> bool:
    return any(run.metric(name) is not None for run in study.runs.values())


def _method(study, label: str, names: list[str], differences: dict) -> dict:
    runs = study.of(label)
    results = [run for run in runs if run.result]
    return {
        "label": label,
        "runs": {
            "asked": len(study.seeds),
            "finished": sum(run.status == "finished" for run in runs),
            "diverged": [_diverged(run) for run in results if run.status == "diverged"],
            "missing": [seed for method, seed in study.missing() if method == label],
        },
        "metrics": {name: interval([v for run in runs if (v := run.metric(name)) is not None]) for name in names},
        "costs": {name: _median([v for run in runs if (v := run.metric(name)) is not None]) for name in COSTS},
        "differences": {name: differences[name][label] for name in names} if label != study.baseline else {},
    }


def _diverged(run) -> dict:
    return {"seed": run.seed, "step": run.result.get("diverged_at_step"), "run": run.path.name}


def _median(values: list[float]) -> float | None:
    import statistics

    return statistics.median(values) if values else None


def _words(methods: int) -> dict:
    return {
        "difference": "method − baseline within a seed; diverged and missing runs make no pair and are listed",
        "interval": f"95 %: Student's t below {BOOTSTRAP_FROM} pairs, BCa bootstrap from {BOOTSTRAP_FROM}",
        "p": f"two-sided sign-flip permutation test, exact up to {EXACT_UP_TO} pairs, else {RESAMPLES:,} random flips",
        "correction": f"Holm over {count(methods, 'method')}, for each metric by itself",
        "verdict": f"better or worse only when the corrected p < {ALPHA} and the interval excludes 0",
    }
