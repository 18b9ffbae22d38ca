"""The entropy floor of Theorem 3.1, and how fast spectral norms grow with the width; no data, no training to an end.

Zhai et al. 2023, arXiv 2303.06296. Float64 on the CPU for the floor, whatever the device; a few steps of Adam on random
images for the norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.results.records import Claim
from headwise_papers.findings import each, findings

if TYPE_CHECKING:
    from headwise_papers.sigma_bound.least_entropy import Least

TITLE = "The entropy floor and the growth of spectral norms"
QUESTION = (
    "Is the entropy floor reached, does the least entropy fall exponentially with the spectral norm, and does "
    "SigmaReparam keep the growth of spectral norms from depending on the width?"
)
SOURCE = "Zhai et al. 2023, arXiv 2303.06296"
# a minimum is reached within this share of the floor, a rate within this share of the theorem's
REACHED, ALIKE = 1e-3, 0.01
# an exponent within this is none
FLAT = 0.1
LABELS = {
    "least": "least of what is reached above the floor, share of the floor",
    "most": "most of what is reached above the floor, share of the floor",
    "rate": "rate of the fall over the theorem's",
    "update": "exponent in the width of the norm of the first update",
    "change": "exponent in the width of the change of the norm",
}
NOTES = (
    "SigmaReparam holds the norm at gamma, which one step moves by at most the learning rate; what is left comes of "
    "the power iteration, which takes one turn a step while a wide matrix moves far.",
    "The norms are exact ones of what the layers compute with, means over the matrices inside the blocks; the floor's "
    "minima are found by L-BFGS from several random starts, over logits and over inputs and weights.",
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Minimise entropies, and take a few steps of Adam on `seeds` random models of each width (10 by default); `jobs`
    and `device` change nothing."""
    from headwise_papers.sigma_bound import least_entropy as floor
    from headwise_papers.sigma_bound import update_growth as growth

    say, seeds = progress or (lambda text: None), seeds or 10
    least: dict[str, list[floor.Least]] = {}
    for tokens in floor.TOKENS:
        say(f"least entropies of {tokens} keys")
        sizes = [size for beyond in floor.BEYOND if (size := math.log(tokens) + beyond) > 0]
        least[f"{tokens} keys"] = [floor.least_entropies(0, tokens, size) for size in sizes]
    moved: dict[str, list[dict[int, tuple[float, float]]]] = {arm: [] for arm in growth.ARMS}
    for seed in range(seeds):
        say(f"steps of Adam, model {seed + 1} of {seeds}")
        for arm in growth.ARMS:
            moved[arm].append({width: growth.moves(seed, width, arm) for width in growth.WIDTHS})
    # the minima depend on no model
    figures = {keys: [_above(found)] * seeds for keys, found in least.items()}
    return findings(
        "sigma-bound",
        TITLE,
        QUESTION,
        figures | {arm: [_exponents(one) for one in found] for arm, found in moved.items()},
        claims(list(least)),
        labels=LABELS,
        notes=NOTES,
        tables=[
            {
                "title": "The floor, and the least entropy reached",
                "columns": [
                    "keys T",
                    "norm σ",
                    "floor (nats)",
                    "reached, over logits",
                    "reached, over inputs, weights",
                ],
                "rows": [
                    [k, one.size, one.floor, one.logits, one.weights] for k, found in least.items() for one in found
                ],
            }
        ],
        charts=_charts(least, {arm: found[0] for arm, found in moved.items()}),
        settings={
            "models": seeds,
            "keys": list(floor.TOKENS),
            "norms": f"log T + {', '.join(f'{beyond:g}' for beyond in floor.BEYOND)}, where positive",
            "starts": floor.STARTS,
            "iterations of L-BFGS": floor.ITERATIONS,
            "width of inputs": floor.DIM,
            "widths": list(growth.WIDTHS),
            "blocks": growth.DEPTH,
            "head size": growth.HEAD,
            "batch": growth.BATCH,
            "Adam": f"learning rate {growth.RATE:g}, {growth.STEPS} steps",
        },
    )


def claims(keys: list[str]) -> list[Claim]:
    """Return what the theorem says of the minima, and what the paper says of the width."""
    return [
        Claim(
            text="The entropy of attention has the floor of Theorem 3.1, and inputs and weights exist that reach it.",
            source=SOURCE,
            # a minimum that was not found is no bound that is not tight, but one below the floor is none
            tests=(*each(keys, "least", "higher", -1e-9), *each(keys, "most", "lower", REACHED)),
        ),
        Claim(
            text="The least attainable entropy falls exponentially with the spectral norm σ, as T·σ·exp(−σ√(T/(T−1))).",
            source=SOURCE,
            tests=(*each(keys, "rate", "same", 1.0, ALIKE),),
        ),
        Claim(
            text="The spectral norm of an update by Adam grows with the width of a plain model.",
            source=SOURCE,
            tests=(*each(["plain"], "update", "higher", FLAT),),
        ),
        Claim(
            text="With SigmaReparam the change of spectral norms does not grow with the width.",
            source=SOURCE,
            tests=(*each(["SigmaReparam"], "change", "same", 0.0, FLAT),),
        ),
    ]


def _above(found: list[Least]) -> dict[str, float]:
    from headwise_papers.sigma_bound.least_entropy import falls_as, rate

    above = [value / one.floor - 1 for one in found for value in (one.logits, one.weights)]
    fall = falls_as(found, lambda one: one.logits) / rate(found[0].tokens)
    return {"least": min(above), "most": max(above), "rate": fall}


def _exponents(by_width: dict[int, tuple[float, float]]) -> dict[str, float]:
    from headwise_papers.sigma_bound.update_growth import exponent

    return {
        name: exponent({width: pair[at] for width, pair in by_width.items()})
        for at, name in enumerate(("update", "change"))
    }


def _charts(least: dict[str, list[Least]], first: dict[str, dict[int, tuple[float, float]]]) -> list[dict[str, Any]]:
    """Draw the least entropies against the norm, and the change of norms of the first model against the width."""
    kinds = {"floor": "floor", "logits": "reached over logits", "weights": "reached over inputs and weights"}
    entropy = [
        {"norm σ": one.size, "entropy (nats)": getattr(one, field), "what": f"{keys}, {words}"}
        for keys, found in least.items()
        for one in found
        for field, words in kinds.items()
    ]
    change = [
        {"width": width, "change of the norm": pair[1], "arm": arm}
        for arm, by_width in first.items()
        for width, pair in by_width.items()
    ]
    return [
        {"title": "Least entropy against the spectral norm", "x": "norm σ", "y": "entropy (nats)", "series": "what"}
        | {"data": entropy, "log_y": True},
        {"title": "Change of spectral norms, first model", "x": "width", "y": "change of the norm", "series": "arm"}
        | {"data": change, "log_x": True, "log_y": True},
    ]
