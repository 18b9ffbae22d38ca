"""A toy problem of weight decay and low rank: L2 on factors compared with the nuclear norm on their product.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819. Target M with known singular values, ½‖ABᵀ − M‖² + λ/2(‖A‖² +
‖B‖²) under gradient flow (classical Runge–Kutta steps), against ½‖W − M‖² + λ‖W‖_* by proximal gradient steps; then two
scalars under torch's AdamW and Adam with L2, direct and as products of factors. Float64 on the CPU, whatever the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_papers.findings import decades, each, findings
from headwise_papers.low_rank_toy.adam_paths import ADAM_STEPS, CURVATURE, DECAYS, OPTIMUM, two_scalars
from headwise_papers.low_rank_toy.gradient_flow import SHAPE, SINGULAR_VALUES, STEP, STRENGTHS, TIME, flow
from headwise_verdict.results.records import Claim

TITLE = "Weight decay on factors is a nuclear norm on their product"
QUESTION = (
    "Does L2 on the factors A and B act as the nuclear norm on ABᵀ: the same singular values, a balance ‖AᵀA − BᵀB‖ "
    "that decays as e^{−2λt}, and, for AdamW, only when ε is large?"
)
SOURCE = "Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, the figure on"
LABELS = {
    "thresholded": "singular values against their soft threshold (decades)",
    "nuclear": "singular values against those of the nuclear norm (decades)",
    "law": "relative error of e^(−2λt) (decades)",
    "gap": "gap of the norms at the end (decades)",
    "bound": "share of the gap's bound that is used",
    "apart": "how far both optimizers end apart, of the way from the minimum without decay",
    "residual": "AdamW's end against its fixed point (decades)",
}
# log10 tolerances of singular values, of trajectories and of norms: far above rounding, far below the effect of λ
EQUAL, ON_COURSE, NONE_LEFT = -6.0, -4.0, -9.0
# tolerance of a distance, as a share of the distance that regularization moves the minimum
SAME_POINT = 0.01
FLOWS = {strength: f"λ = {strength:g}" for strength in STRENGTHS}
DECAYING = tuple(name for strength, name in FLOWS.items() if strength)
KINDS = {False: "scalars", True: "products"}
PATHS = {(kind, epsilon): f"{words}, ε = {epsilon:g}" for kind, words in KINDS.items() for epsilon in DECAYS}
CLAIMS = (
    Claim(
        text="L2 on the factors and the nuclear norm on their product have the same solution.",
        source=f"{SOURCE} factorised matrices W = ABᵀ",
        tests=(*each(DECAYING, "nuclear", "lower", EQUAL),),
    ),
    Claim(
        text="The gap between Frobenius and nuclear norm vanishes under decay.",
        source=f"{SOURCE} factorised matrices W = ABᵀ",
        tests=(*each(DECAYING, "gap", "lower", NONE_LEFT), *each([FLOWS[0.0]], "gap", "higher", NONE_LEFT)),
    ),
    Claim(
        text="The discrepancy AᵀA − BᵀB vanishes exponentially fast.",
        source=f"{SOURCE} factorised matrices W = ABᵀ",
        tests=(*each(FLOWS.values(), "law", "lower", ON_COURSE),),
    ),
    Claim(
        text="Singular values fall linearly with λ until they are 0.",
        source=f"{SOURCE} factorised matrices W = ABᵀ",
        tests=(*each(DECAYING, "thresholded", "lower", EQUAL),),
    ),
    Claim(
        text="AdamW and Adam with L2 of equivalent strength end at the same point.",
        source=f"{SOURCE} two parameters",
        tests=(*each([PATHS[kind, max(DECAYS)] for kind in KINDS], "apart", "lower", SAME_POINT),),
    ),
)
NOTES = (
    "With the loss ‖ABᵀ − M‖² without its ½, as a figure of the paper prints it, λ takes off λ/2.",
    "Only where ε is large do AdamW and Adam with L2 of strength ελ end at the same point. With the least ε, AdamW "
    "circles its fixed point in steps as long as its rate, so that its distance from it is not small there.",
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the findings on `seeds` random problems (default 6; fewer give no verdict).

    `jobs` and `device` have no effect.
    """
    say, seeds = progress or (lambda text: None), seeds or 6
    flows: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        say(f"gradient flow, problem {seed + 1} of {seeds}")
        for strength, name in FLOWS.items():
            flows.setdefault(name, []).append(flow(seed, strength))
        flows.setdefault("λ = 0.5, ‖ABᵀ − M‖² without its ½", []).append(flow(seed, 0.5, loss_factor=2.0))
    say("two scalars under AdamW and Adam with L2")
    paths = {name: two_scalars(epsilon, factorised) for (factorised, epsilon), name in PATHS.items()}
    figures = {name: [_figures_of_flow(one) for one in results] for name, results in flows.items()}
    return findings(
        "low-rank-toy",
        TITLE,
        QUESTION,
        # the problem of two scalars has nothing random
        figures | {name: [_figures_of_path(one)] * seeds for name, one in paths.items()},
        CLAIMS,
        labels=LABELS,
        notes=NOTES,
        charts=[
            *_flow_charts({name: found[0] for name, found in flows.items() if name in FLOWS.values()}),
            *_path_charts(paths),
        ],
        settings={
            "problems": seeds,
            "flow": {
                "singular_values": SINGULAR_VALUES,
                "strengths": STRENGTHS,
                "shape": SHAPE,
                "time": TIME,
                "step": STEP,
            },
            "two_scalars": {
                "optimum": OPTIMUM,
                "curvature": CURVATURE,
                "decay_by_epsilon": {f"{e:g}": d for e, d in DECAYS.items()},
                "steps": ADAM_STEPS,
            },
            "precision": "float64, CPU",
        },
    )


def _figures_of_flow(result: dict[str, Any]) -> dict[str, float]:
    distances = {key: max(abs(x - y) for x, y in zip(result["end"], result[key])) for key in ("thresholded", "nuclear")}
    errors = distances | {"law": result["law_error"], "gap": result["course"][-1]["gap"]}
    return {name: decades(error) for name, error in errors.items()} | {"bound": result["bound_used"]}


def _figures_of_path(result: dict[str, Any]) -> dict[str, float]:
    distance = result["distance"] / math.dist(OPTIMUM, result["solution"])
    return {"apart": distance, "residual": decades(result["residual"])}


def _flow_charts(flows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of the gradient flow of one problem."""
    balance, gap = "‖AᵀA − BᵀB‖", "½(‖A‖² + ‖B‖²) − ‖ABᵀ‖_*"
    thresholds = [
        {"singular value of M": s, "after training": end, "λ": name.removeprefix("λ = ")}
        for name, flow_ in flows.items()
        for s, end in zip(SINGULAR_VALUES, flow_["end"])
    ]
    balances = [
        {"time t": point["time"], balance: point[key], "curve": f"{name}, {words}"}
        for name, flow_ in flows.items()
        for words, key in (("flow", "balance"), ("e^(−2λt)", "law"))
        for point in flow_["course"][:: 1 if flow_["strength"] else 8]
        if point["law"] > 1e-8
    ]
    gaps = [
        {"time t": point["time"], gap: point["gap"], "curve": name}
        for name, flow_ in flows.items()
        for point in flow_["course"]
        if point["gap"] > 1e-10
    ]
    courses = [
        {"time t": point["time"], "singular value": value, "curve": f"s = {s:g} → {max(s - 0.5, 0):g}"}
        for point in flows["λ = 0.5"]["course"]
        if point["time"] <= 20
        for s, value in zip(SINGULAR_VALUES, point["singular"])
    ]
    over_time = {"x": "time t", "series": "curve"}
    soft = {"x": "singular value of M", "y": "after training", "series": "λ", "points": True}
    return [
        {"title": "Soft thresholding: s → max(s − λ, 0)", **soft, "data": thresholds},
        {"title": "Balance against its law", "y": balance, "data": balances, "log_y": True, **over_time},
        {"title": "L2 approaches the nuclear norm", "y": gap, "data": gaps, "log_y": True, **over_time},
        {"title": "Singular values over time, λ = 0.5", "y": "singular value", "data": courses, **over_time},
    ]


def _path_charts(paths: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of the two scalars' paths at the smallest and the largest ε."""
    paths_by_kind = {kind: [paths[PATHS[kind, epsilon]] for epsilon in (min(DECAYS), max(DECAYS))] for kind in KINDS}
    return [
        {
            "title": f"Two scalars, {'as products of two factors' if kind else 'direct'}: the paths",
            "x": "w₁",
            "y": "w₂",
            "series": "optimizer",
            "data": [
                {"w₁": x, "w₂": y, "optimizer": f"{optimizer}, ε = {path['epsilon']:g}"}
                for path in both
                for optimizer in ("AdamW", "Adam + L2")
                for x, y in path[optimizer]["path"]
            ],
        }
        for kind, both in paths_by_kind.items()
    ]
