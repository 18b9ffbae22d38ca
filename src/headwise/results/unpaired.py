"""Arms that are no pairs with the baseline: Welch's test of two independent samples, Bonferroni's correction over the
arms.

Welch, The generalization of "Student's" problem when several different population variances are involved, Biometrika 34
(1947).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headwise.results.intervals import ALPHA


def unpaired_difference(ours: Sequence[float], base: Sequence[float], arms: int) -> dict[str, Any]:
    """Return mean difference, interval and p of two samples; `arms` are judged together."""
    import numpy as np
    from scipy import stats

    one, other = np.asarray(ours, dtype=float), np.asarray(base, dtype=float)
    n = int(min(len(one), len(other)))
    if not n:
        return {"mean": None, "n": 0, "low": None, "high": None, "how": None, "p": None, "p_corrected": None}
    mean = float(one.mean() - other.mean())
    if n < 2:
        return {"mean": mean, "n": n, "low": None, "high": None, "how": None, "p": None, "p_corrected": None}
    parts = one.var(ddof=1) / len(one), other.var(ddof=1) / len(other)
    error = math.sqrt(sum(parts))
    if error <= 1e-12 * max(1.0, float(np.abs([*one, *other]).max())):
        p = float(mean == 0)
        return {
            "mean": mean,
            "n": n,
            "low": mean,
            "high": mean,
            "how": "all values are equal",
            "p": p,
            "p_corrected": p,
        }
    degrees = error**4 / (parts[0] ** 2 / (len(one) - 1) + parts[1] ** 2 / (len(other) - 1))
    half = float(stats.t.ppf(1 - ALPHA / 2 / arms, degrees)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, degrees))
    return {
        "mean": mean,
        "n": n,
        "low": mean - half,
        "high": mean + half,
        "how": "Welch's t, not paired" + (", Bonferroni" if arms > 1 else ""),
        "p": p,
        "p_corrected": min(1.0, p * arms),
    }
