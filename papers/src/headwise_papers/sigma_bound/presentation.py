"""What the study of the floor says of its numbers: verdicts, tables and charts."""

from __future__ import annotations

from typing import Any

from headwise.results.analysis_record import Interval
from headwise.results.claim_record import JudgedClaim, Verdict
from headwise.results.intervals import interval
from headwise_papers.sigma_bound import least_entropy as floor
from headwise_papers.sigma_bound import update_growth as growth
from headwise_papers.sigma_bound.least_entropy import Least, falls_as, rate

SOURCE = "Zhai et al. 2023, arXiv 2303.06296"
# a minimum is reached within this share of the floor, a rate within this share of the theorem's
REACHED, ALIKE = 1e-3, 0.01
# an exponent within this is none
FLAT = 0.1
UPDATE, CHANGE = "norm of the first update", "change of the norm"
PLAIN, OURS = growth.ARMS
# arm, seed, width, and the two means of `moves`
Moved = tuple[str, int, int, float, float]
Grown = dict[tuple[str, str], Interval]


def exponents(moved: list[Moved]) -> Grown:
    """Return the exponent in the width of both figures of each arm, and of SigmaReparam − plain, with intervals over
    models."""
    found: Grown = {}
    seeds = sorted({seed for _, seed, *_ in moved})
    for at, what in ((3, UPDATE), (4, CHANGE)):
        by_arm = {arm: [_exponent(moved, arm, seed, at) for seed in seeds] for arm in growth.ARMS}
        found |= {(arm, what): interval(values) for arm, values in by_arm.items()}
        found["difference", what] = interval([b - a for a, b in zip(by_arm[PLAIN], by_arm[OURS], strict=True)])
    return found


def claims(least: list[Least], grown: Grown) -> list[dict[str, Any]]:
    """Judge the theorem by the minima reached, and what is said of the width by the intervals of the exponents."""
    off = _off(least)
    # a minimum that was not found is no bound that is not tight
    tight: Verdict = "contrary" if min(off) < -1e-9 else "as published" if max(off) < REACHED else "undecided"
    rates = _rates(least)
    apart = max(abs(found / rate(tokens) - 1) for tokens, found in rates.items())
    flat, rising = grown[OURS, CHANGE], grown[PLAIN, UPDATE]
    judged = [
        JudgedClaim(
            text="The entropy of attention has the floor of Theorem 3.1, and inputs and weights exist that reach it.",
            ours=f"least entropies reached lie {min(off):.1e} to {max(off):.1e} of the floor above it",
            verdict=tight,
        ),
        JudgedClaim(
            text="The least attainable entropy falls exponentially with the spectral norm σ, as T·σ·exp(−σ√(T/(T−1))).",
            ours="; ".join(f"T = {t}: rate {found:.3f}, the theorem's {rate(t):.3f}" for t, found in rates.items()),
            verdict="as published" if apart < ALIKE else "contrary",
        ),
        JudgedClaim(
            text="The spectral norm of an update by Adam grows with the width of a plain model.",
            ours=f"as the width to the power {_span(rising)}",
            verdict=_outside(rising, above=True),
        ),
        JudgedClaim(
            text="With SigmaReparam the change of spectral norms does not grow with the width.",
            ours=f"as the width to the power {_span(flat)}, in the plain model {_span(grown[PLAIN, CHANGE])}, "
            f"difference {_span(grown['difference', CHANGE])}",
            verdict=_outside(flat, above=False),
        ),
    ]
    return [claim.model_copy(update={"source": SOURCE}).model_dump(mode="json") for claim in judged]


def paragraphs(least: list[Least], grown: Grown) -> list[str]:
    """Say what was found, the answer first."""
    off = _off(least)
    return [
        f"Optimisation reaches the entropy floor to {max(off):.0e} of it, over logits of bounded norm and over inputs "
        "and weights alike, and never "
        "passes below it. The spectral norms of a small transformer change with its width to the power "
        f"{_span(grown[PLAIN, CHANGE])} in "
        f"{growth.STEPS} steps of Adam, and to the power {_span(grown[OURS, CHANGE])} with SigmaReparam.",
        f"An exponent within ±{FLAT:g} counts as none. Updates themselves grow alike in both: with the width to the "
        "power "
        f"{_span(grown[PLAIN, UPDATE])} and {_span(grown[OURS, UPDATE])}. SigmaReparam holds the norm at gamma, which "
        "one step moves by at most the learning rate; what is "
        "left comes of the power iteration, which takes one turn a step while a wide matrix moves far.",
        "The norms are exact ones of what the layers compute with, means over the matrices inside the blocks; the "
        "floor's minima are found by L-BFGS from "
        f"{floor.STARTS} random starts each.",
    ]


def floor_table(least: list[Least]) -> dict[str, Any]:
    """Return the floor beside the least entropies reached."""
    columns = ["keys T", "norm σ", "floor (nats)", "reached, over logits", "reached, over inputs and weights"]
    rows = [
        [one.tokens, f"{one.size:.2f}", f"{one.floor:.6g}", f"{one.logits:.6g}", f"{one.weights:.6g}"] for one in least
    ]
    return {"title": "The floor and what is reached", "columns": columns, "rows": rows}


def growth_table(moved: list[Moved], grown: Grown) -> dict[str, Any]:
    """Return the means at every width and the exponents."""
    rows = []
    for arm in growth.ARMS:
        for at, what in ((3, UPDATE), (4, CHANGE)):
            means = [
                interval([float(row[at]) for row in moved if row[0] == arm and row[2] == w]).mean for w in growth.WIDTHS
            ]
            rows.append([arm, what, *(f"{mean:.4g}" for mean in means), _span(grown[arm, what])])
    columns = ["arm", "spectral norm", *(f"width {width}" for width in growth.WIDTHS), "exponent [95 %]"]
    return {"title": f"Against the width, {growth.STEPS} steps of Adam", "columns": columns, "rows": rows}


def charts(least: list[Least], moved: list[Moved]) -> list[dict[str, Any]]:
    """Draw the least entropies against the norm, and the change of norms against the width."""
    kinds = {"floor": "floor", "logits": "reached over logits", "weights": "reached over inputs and weights"}
    entropy = [
        {"norm σ": one.size, "entropy (nats)": getattr(one, field), "what": f"T = {one.tokens}, {words}"}
        for one in least
        for field, words in kinds.items()
    ]
    change = [{"width": width, CHANGE: value, "arm": arm} for arm, seed, width, _, value in moved if seed == 0]
    return [
        {"title": "Least entropy against the spectral norm", "x": "norm σ", "y": "entropy (nats)", "series": "what"}
        | {"data": entropy, "log_y": True},
        {"title": f"Change of spectral norms in {growth.STEPS} steps, first model", "x": "width", "y": CHANGE}
        | {"series": "arm", "data": change, "log_x": True, "log_y": True},
    ]


def settings(seeds: int) -> dict[str, Any]:
    """Return what the numbers hang on."""
    return {
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
    }


def _off(least: list[Least]) -> list[float]:
    return [value / one.floor - 1 for one in least for value in (one.logits, one.weights)]


def _rates(least: list[Least]) -> dict[int, float]:
    found = {}
    for tokens in floor.TOKENS:
        found[tokens] = falls_as([one for one in least if one.tokens == tokens], lambda one: one.logits)
    return found


def _exponent(moved: list[Moved], arm: str, seed: int, at: int) -> float:
    return growth.exponent({row[2]: float(row[at]) for row in moved if row[0] == arm and row[1] == seed})


def _outside(found: Interval, *, above: bool) -> Verdict:
    """Judge whether an exponent lies above what counts as none (`above`), or within it, from its interval."""
    if found.low is None or found.high is None:
        return "undecided"
    if found.low > FLAT:
        return "as published" if above else "contrary"
    if found.high < FLAT:
        return "contrary" if above or found.low < -FLAT else "as published"
    return "undecided"


def _span(found: Interval) -> str:
    if found.mean is None or found.low is None or found.high is None:
        return "–" if found.mean is None else f"{found.mean:.2f}"
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
