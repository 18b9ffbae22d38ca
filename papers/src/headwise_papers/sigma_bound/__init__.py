"""A study of the entropy floor of Theorem 3.1 and of the growth of spectral norms with the width, without data.

Zhai et al. 2023, arXiv 2303.06296. The floor is computed in float64 on the CPU, whatever the device; the norms come
from a few steps of Adam on random images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise_papers.findings import each, findings
from headwise_verdict.results.records import Claim

if TYPE_CHECKING:
    from headwise_papers.sigma_bound.least_entropy import Least

TITLE = "The entropy floor and the growth of spectral norms"
QUESTION = (
    "Is the entropy floor reached, does the least entropy fall exponentially with the spectral norm, and does "
    "SigmaReparam keep the growth of spectral norms from depending on the width?"
)
SOURCE = "Zhai et al. 2023, arXiv 2303.06296"
# relative tolerances: of a minimum to the floor, and of a rate to the theorem's
REACHED, ALIKE = 1e-3, 0.01
# a smaller exponent counts as 0
FLAT = 0.1
# power iterations after each step: one, as in the authors' code, or so many that sigma is the largest singular value
ONCE, CONVERGED = "SigmaReparam", "SigmaReparam, 64 iterations"
POWER_ITERATIONS = {"plain": 0, ONCE: 1, CONVERGED: 64}
LABELS = {
    "least": "least of what is reached above the floor, share of the floor",
    "most": "most of what is reached above the floor, share of the floor",
    "rate": "rate of the fall over the theorem's",
    "update": "exponent in the width of the norm of the first update",
    "change": "exponent in the width of the change of the norm",
}
NOTES = (
    "SigmaReparam holds the norm at gamma, which one step moves by at most the learning rate; with one "
    "power iteration per step, as in the authors' code, sigma lags behind a matrix that moves far.",
    "The norms are exact, of the weights that the layers compute with, as means over the matrices inside the blocks; "
    "the floor's minima are found by L-BFGS from several random starts, over logits and over inputs and weights.",
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the findings: minimise entropies, and take a few steps of Adam on `seeds` models of each width (default
    10).

    `jobs` and `device` have no effect.
    """
    from headwise_papers.sigma_bound import least_entropy as floor
    from headwise_papers.sigma_bound import update_growth as growth

    say, seeds = progress or (lambda text: None), seeds or 10
    least: dict[str, list[floor.Least]] = {}
    for tokens in floor.TOKENS:
        say(f"least entropies of {tokens} keys")
        sizes = [size for beyond in floor.BEYOND if (size := math.log(tokens) + beyond) > 0]
        least[f"{tokens} keys"] = [floor.least_entropies(0, tokens, size) for size in sizes]
    changes: dict[str, list[dict[int, tuple[float, float]]]] = {arm: [] for arm in POWER_ITERATIONS}
    for seed in range(seeds):
        say(f"steps of Adam, model {seed + 1} of {seeds}")
        for arm in POWER_ITERATIONS:
            changes[arm].append({width: growth.moves(seed, width, POWER_ITERATIONS[arm]) for width in growth.WIDTHS})
    # the minima do not depend on the seed of a model
    figures = {keys: [_above(minima)] * seeds for keys, minima in least.items()}
    return findings(
        "sigma-bound",
        TITLE,
        QUESTION,
        figures | {arm: [_exponents(one) for one in by_width] for arm, by_width in changes.items()},
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
                    [k, one.size, one.floor, one.logits, one.weights] for k, minima in least.items() for one in minima
                ],
            }
        ],
        charts=_charts(least, {arm: by_seed[0] for arm, by_seed in changes.items()}),
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
    """Return the theorem's claims on the minima and the paper's claims on the width."""
    return [
        Claim(
            text="The entropy of attention has the floor of Theorem 3.1, and inputs and weights exist that reach it.",
            source=SOURCE,
            # a failed search does not refute that the floor is tight, but a minimum below it refutes the floor
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
            # a theorem on the largest singular value itself; a change that falls with the width does not grow
            tests=(*each([CONVERGED], "change", "lower", FLAT),),
        ),
        Claim(
            text="With one power iteration per step, as in the authors' code, the change does not grow with the width "
            "either.",
            source="ours: what the estimate of the largest singular value costs",
            tests=(*each([ONCE], "change", "lower", FLAT),),
        ),
    ]


def _above(minima: list[Least]) -> dict[str, float]:
    from headwise_papers.sigma_bound.least_entropy import falls_as, rate

    above = [value / one.floor - 1 for one in minima for value in (one.logits, one.weights)]
    fall = falls_as(minima, lambda one: one.logits) / rate(minima[0].tokens)
    return {"least": min(above), "most": max(above), "rate": fall}


def _exponents(by_width: dict[int, tuple[float, float]]) -> dict[str, float]:
    from headwise_papers.sigma_bound.update_growth import exponent

    return {
        name: exponent({width: pair[at] for width, pair in by_width.items()})
        for at, name in enumerate(("update", "change"))
    }


def _charts(least: dict[str, list[Least]], first: dict[str, dict[int, tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return the charts of least entropy against norm, and of the first model's change of norms against width."""
    kinds = {"floor": "floor", "logits": "reached over logits", "weights": "reached over inputs and weights"}
    entropy = [
        {"norm σ": one.size, "entropy (nats)": getattr(one, field), "what": f"{keys}, {words}"}
        for keys, minima in least.items()
        for one in minima
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
