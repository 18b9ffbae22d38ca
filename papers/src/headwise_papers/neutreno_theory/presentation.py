"""The words, tables and the chart of the theory's findings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from headwise_papers.neutreno_theory.passes import DEPTH, KINDS, LIMIT, STEPS, STRENGTHS

EXACT = 1e-9
SOURCE = "Nguyen et al. 2023, arXiv 2312.00751"
# passes over which J is followed: later it is rounding
FOLLOWED = 30


def judged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims with their verdicts, each from the numbers of all layers."""
    symmetric = [one for one in found if one["kind"] == "symmetric"]
    walk = _most(found, "walk_error")
    mean = max(_most(found, "to_the_mean"), _most(found, "stationary_error"))
    degree, step = _most(symmetric, "degree_error"), _most(symmetric, "step_error")
    falls = sum(_falls(one) for one in symmetric)
    kept = min(one["spreads"][0.6][-1] for one in found)
    end = max(one["ends"][0.6] for one in found if one["ends"][0.6] is not None)
    return [
        _claim(
            "After m layers a token is the expected value of a random walk of m steps over the tokens (Lemma 1).",
            walk < EXACT,
            f"largest difference {walk:.1e} over {len(found)} layers, every walk of {STEPS} steps followed",
        ),
        _claim(
            "The walk has one stationary distribution, and without the fidelity term every token becomes its mean "
            "(Lemma 2).",
            mean < EXACT,
            f"after {LIMIT:,} passes every token is within {mean:.1e} of it, in {len(found)} layers",
        ),
        _claim(
            "With a symmetric kernel the stationary weight of a token is its share of the kernel's sum (Lemma 2).",
            degree < EXACT,
            f"largest difference {degree:.1e} over {len(symmetric)} layers",
        ),
        _claim(
            "Symmetric attention is one step of gradient descent on J, which falls from layer to layer.",
            step < EXACT and falls == len(symmetric),
            f"u − ∇J/ΣK within {step:.1e} of attention; J fell in each of {FOLLOWED - 1} passes in {falls} of "
            f"{len(symmetric)} layers",
        ),
        _claim(
            "With the fidelity term tokens do not converge to a constant (Proposition 1).",
            kept > 0.01 and end < EXACT,
            f"at λ = 0.6 at least {kept:.1%} of the spread stays, and the end is within {end:.1e} of λ((1 + λ)I − "
            "A)⁻¹u⁰",
        ),
    ]


def _claim(text: str, holds: bool, ours: str) -> dict[str, Any]:
    return {"text": text, "source": SOURCE, "ours": ours, "verdict": "as published" if holds else "contrary"}


def _falls(one: dict[str, Any]) -> bool:
    """Return whether J fell in every pass; below 1e-20 of its beginning it is rounding."""
    return all(after < before for before, after in pairwise(one["functional"][:FOLLOWED]) if before > 1e-20)


def _most(found: list[dict[str, Any]], name: str) -> float:
    return max(float(one[name]) for one in found)


def _span(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def paragraphs(found: list[dict[str, Any]], claims: list[dict[str, Any]]) -> list[str]:
    """Return the sentences of the findings, the answer first."""
    attention = [one for one in found if one["kind"] == "attention"]
    agree = sum(claim["verdict"] == "as published" for claim in claims)
    kept = _span([one["spreads"][0.6][-1] for one in attention], ".1%")
    seconds = _span([one["second"] for one in attention], ".3f")
    grown = sum(one["ends"][2.0] is None for one in found)
    falling = sum(_falls(one) for one in attention)
    share = _span([one["step_error"] for one in attention], ".2f")
    return [
        f"{agree} of {len(claims)} statements of the theory hold in numbers: without the fidelity term all tokens "
        "become the stationary mean, "
        f"with λ = 0.6 {kept} of their spread stays.",
        f"The spread falls by the second eigenvalue of A at each pass, {seconds} in size in random layers.",
        "The fidelity term has a limit of its own: with A held, the passes converge only while λ < 1 + the least "
        "eigenvalue of A. At λ = 2 they "
        f"grow without bound in {grown} of {len(found)} layers.",
        "Attention's own kernel is not symmetric. There the step is no gradient step of J, from which it is away by "
        f"{share}, and J fell in every "
        f"one of {FOLLOWED - 1} passes in {falling} of {len(attention)} layers.",
        "How alike the tokens of whole random models grow, without and with NeuTRENO, is the study "
        "oversmoothing-at-init.",
    ]


def statements(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of distances between statements and numbers."""
    names = ("walk_error", "stationary_error", "degree_error", "to_the_mean", "step_error", "second", "least")
    columns = ["kernel", "walks", "πA − π", "π − share of the kernel", "u − stationary mean", "step − gradient step"]
    rows = [
        [kind, *(_span([one[name] for one in found if one["kind"] == kind], ".1e") for name in names[:5])]
        + [_span([one[name] for one in found if one["kind"] == kind], ".3f") for name in names[5:]]
        for kind in KINDS
    ]
    return {
        "title": "How far each statement is from the numbers",
        "columns": [*columns, "second eigenvalue", "least"],
        "rows": rows,
    }


def strengths(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of what each strength leaves."""
    rows = []
    for kind in KINDS:
        for strength in STRENGTHS:
            here = [one for one in found if one["kind"] == kind]
            ended = sum(strength == 0 or one["ends"][strength] is not None for one in here)
            ends = [one["spreads"][strength][-1] for one in here]
            rows.append([kind, strength, f"{ended} of {len(here)}", _span(ends, ".3g")])
    columns = ["kernel", "λ", "converges", f"spread left after {DEPTH} passes"]
    return {"title": "What is left of the spread of tokens", "columns": columns, "rows": rows}


def chart(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of tokens by passes for the strengths at which it may stay bounded."""
    attention, data = [one for one in found if one["kind"] == "attention"], []
    for strength in STRENGTHS:
        if strength > 1:
            continue
        for at in (*range(21), *range(25, 41, 5)):
            mean = sum(one["spreads"][strength][at] for one in attention) / len(attention)
            data.append({"passes": at, "spread left": mean, "λ": f"{strength:g}"})
    return {
        "title": "Spread of tokens by passes, mean over layers",
        "x": "passes",
        "y": "spread left",
        "series": "λ",
        "data": data,
        "log_y": True,
    }
