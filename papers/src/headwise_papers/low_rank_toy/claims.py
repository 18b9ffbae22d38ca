"""Hold what the toy's flows and paths gave against what the source's figures show of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise_papers.low_rank_toy.adam_paths import DECAYS, OPTIMUM

SOURCE = "Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819"
# of a singular value, of a course and of a norm: far above rounding, far below what λ changes
EQUAL, ON_COURSE, NONE_LEFT = 1e-6, 1e-4, 1e-9
# of how far the regularization moves the minimum
SAME_POINT = 0.01

Found = dict[str, Any]


def claims(flows: list[Found], paths: list[Found]) -> list[Found]:
    """Return the claims of the source's figures on the factorised toy, each with what was seen and its verdict."""
    decaying = [found for found in flows if found["strength"] > 0]
    apart = {
        key: max(abs(x - y) for one in decaying for x, y in zip(one["end"], one[key]))
        for key in ("thresholded", "nuclear")
    }
    course = max(one["law_error"] for one in flows)
    gaps = [abs(one["course"][-1]["gap"]) for one in decaying]
    left = min(one["course"][-1]["gap"] for one in flows if one["strength"] == 0)
    pairs = [one for one in paths if one["epsilon"] == max(DECAYS)]
    shares = [one["distance"] / _distance(OPTIMUM, one["solution"]) for one in pairs]
    figure = "the figure on factorised matrices W = ABᵀ"
    return [
        _claim(
            "L2 on the factors and the nuclear norm on their product have the same solution.",
            figure,
            f"singular values of both differ by at most {apart['nuclear']:.1e}",
            apart["nuclear"] < EQUAL,
        ),
        _claim(
            "The gap between Frobenius and nuclear norm vanishes under decay.",
            figure,
            f"at most {max(gaps):.1e} at the end with λ > 0, at least {left:.2f} without decay",
            max(gaps) < NONE_LEFT < left,
        ),
        _claim(
            "The discrepancy AᵀA − BᵀB vanishes exponentially fast.",
            figure,
            f"it follows e^(−2λt) to a relative error of {course:.1e}",
            course < ON_COURSE,
        ),
        _claim(
            "Singular values fall linearly with λ until they are 0.",
            figure,
            f"at most {apart['thresholded']:.1e} from max(s − λ, 0)",
            apart["thresholded"] < EQUAL,
        ),
        _claim(
            "AdamW and Adam with L2 of equivalent strength end at the same point.",
            "the figure on two parameters",
            f"with ε = {max(DECAYS):g} they end {' and '.join(f'{share:.2%}' for share in shares)} of the way from the "
            "unregularized minimum apart (scalars, products); with a small ε they do not",
            max(shares) < SAME_POINT,
        ),
    ]


def _claim(text: str, where: str, ours: str, holds: bool) -> Found:
    verdict = "as published" if holds else "contrary"
    return {"text": text, "source": f"{SOURCE}, {where}", "ours": ours, "verdict": verdict}


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum((x - y) ** 2 for x, y in zip(one, other)) ** 0.5)
