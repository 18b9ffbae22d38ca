"""A numerical study of NeuTRENO's theory: attention as a random walk and as gradient descent on J, without training.

Nguyen et al. 2023, arXiv 2312.00751, sections 2 and 3. One layer has fixed random queries and keys, and its values pass
through it repeatedly: u ← Au + λ(u⁰ − u), with λ = 0 for softmax attention. A = softmax(kkᵀ/√d) is the paper's
symmetric case, softmax(qkᵀ/√d) attention itself. All computations are in float64 on the CPU, whatever the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from headwise_papers.findings import decades, each, findings
from headwise_papers.neutreno_theory.passes import DEPTH, KINDS, SIZE, STRENGTHS, TOKENS, measure
from headwise_verdict.results.records import Claim

TITLE = "NeuTRENO's theory: where tokens go without and with the fidelity term"
QUESTION = (
    "Do tokens that pass through the same attention again and again all become the stationary mean of its random "
    "walk, and does the fidelity term prevent it?"
)
SOURCE = "Nguyen et al. 2023, arXiv 2312.00751"
# largest log10 of an error due to rounding
EXACT = -9.0
# passes over which J is compared: after them, rounding dominates
FOLLOWED = 30
ERRORS = {
    "walk_error": "passes against walks (decades)",
    "stationary_error": "πA against π (decades)",
    "degree_error": "π against the share of the kernel (decades)",
    "to_the_mean": "tokens against the stationary mean (decades)",
    "step_error": "step against the gradient step of J (decades)",
    "end_error": "end at λ = 0.6 against λ((1 + λ)I − A)⁻¹u⁰ (decades)",
}
LABELS = {
    **ERRORS,
    "falls": "passes in which J falls (share)",
    "second": "second eigenvalue of A",
    "least": "least eigenvalue of A",
    **{f"left {strength:g}": f"spread left at λ = {strength:g}" for strength in STRENGTHS if strength < 1},
    **{f"converges {strength:g}": f"layers that converge at λ = {strength:g}" for strength in STRENGTHS if strength},
}
CLAIMS = (
    Claim(
        text="After m layers a token is the expected value of a random walk of m steps over the tokens (Lemma 1).",
        source=SOURCE,
        tests=(*each(KINDS, "walk_error", "lower", EXACT),),
        kind="by construction",
    ),
    Claim(
        text="The walk has one stationary distribution, and without the fidelity term every token becomes its mean "
        "(Lemma 2).",
        source=SOURCE,
        tests=(*each(KINDS, "to_the_mean", "lower", EXACT), *each(KINDS, "stationary_error", "lower", EXACT)),
        kind="by construction",
    ),
    Claim(
        text="With a symmetric kernel the stationary weight of a token is its share of the kernel's sum (Lemma 2).",
        source=SOURCE,
        tests=(*each(["symmetric"], "degree_error", "lower", EXACT),),
        kind="by construction",
    ),
    Claim(
        text="Symmetric attention is one step of gradient descent on J, which falls from layer to layer.",
        source=SOURCE,
        tests=(
            *each(["symmetric"], "step_error", "lower", EXACT),
            *each(["symmetric"], "falls", "same", 1.0, margin=0.01),
        ),
    ),
    Claim(
        text="With the fidelity term tokens do not converge to a constant (Proposition 1).",
        source=SOURCE,
        tests=(*each(KINDS, "left 0.6", "higher", 0.01), *each(KINDS, "end_error", "lower", EXACT)),
    ),
)
NOTES = (
    "Each pass multiplies the spread by the second eigenvalue of A. With A fixed, the passes with the fidelity term "
    "converge only while λ < 1 + the smallest eigenvalue of A.",
    "Attention's own kernel is not symmetric, so that its step is not a gradient step of J. The study "
    "oversmoothing-at-init measures how similar the tokens of whole random models become, without and with NeuTRENO.",
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the findings on every statement from `seeds` random layers (default 10).

    `jobs` and `device` have no effect.
    """
    say, seeds = progress or (lambda text: None), seeds or 10
    layers_by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for seed in range(seeds):
        say(f"random layer {seed + 1} of {seeds}")
        for kind in KINDS:
            layers_by_kind[kind].append(measure(seed, kind))
    return findings(
        "neutreno-theory",
        TITLE,
        QUESTION,
        {kind: [figures(one) for one in layers] for kind, layers in layers_by_kind.items()},
        CLAIMS,
        labels=LABELS,
        notes=NOTES,
        charts=[_chart(layers_by_kind["attention"])],
        settings={
            "layers": seeds,
            "tokens": TOKENS,
            "size of a head": SIZE,
            "passes": DEPTH,
            "strengths": list(STRENGTHS),
        },
    )


def figures(layer: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one random layer by the names of `LABELS`."""
    path = [value for value in layer["functional"][:FOLLOWED] if value > 1e-20]
    results = {name: decades(layer[name]) for name in ERRORS if name in layer}
    results |= {"second": layer["second"], "least": layer["least"]}
    # below 1e-20 of its initial value, J is only rounding
    results["falls"] = sum(after < before for before, after in pairwise(path)) / max(len(path) - 1, 1)
    if layer["ends"][0.6] is not None:
        results["end_error"] = decades(layer["ends"][0.6])
    results |= {f"left {at:g}": left[-1] for at, left in layer["spreads"].items() if at < 1}
    return results | {f"converges {at:g}": float(end is not None) for at, end in layer["ends"].items()}


def _chart(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chart of the spread of tokens by passes, for the strengths at which it may stay bounded."""
    data = [
        {"passes": at, "spread left": sum(one["spreads"][strength][at] for one in layers) / len(layers)}
        | {"λ": f"{strength:g}"}
        for strength in STRENGTHS
        if strength <= 1
        for at in (*range(21), *range(25, 41, 5))
    ]
    title = "Spread of tokens by passes, mean over layers"
    return {"title": title, "x": "passes", "y": "spread left", "series": "λ", "data": data, "log_y": True}
