"""Put the toy's results into words, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise_papers.low_rank_toy.adam_paths import ADAM_STEPS, CURVATURE, DECAYS, OPTIMUM
from headwise_papers.low_rank_toy.gradient_flow import LAW_UNTIL, SHAPE, SINGULAR_VALUES, STEP, STRENGTHS, TIME

# what one gradient flow, or one pair of paths, gave
Found = dict[str, Any]


def paragraphs(flows: list[Found], unhalved: list[Found], paths: list[Found], seeds: int) -> list[str]:
    """Return the findings in words, every figure from the data; the first paragraph is the answer."""
    decaying = [found for found in flows if found["strength"] > 0]
    off, nuclear = _largest(decaying, "thresholded"), _largest(decaying, "nuclear")
    scalars, products = (
        {f["epsilon"]: f for f in paths if f["factorised"] == factorised} for factorised in (False, True)
    )
    large, small, product = scalars[max(DECAYS)], scalars[min(DECAYS)], products[max(DECAYS)]
    return [
        f"Trained with L2 on the factors, the product's singular values end within {off:.1e} of max(s − λ, 0), and "
        f"within {nuclear:.1e} of "
        f"those of the nuclear-norm problem solved by itself ({seeds} random problems, λ of "
        f"{', '.join(f'{x:g}' for x in STRENGTHS if x)}).",
        "‖AᵀA − BᵀB‖ follows its start times e^(−2λt) to a relative error of at most "
        f"{max(f['law_error'] for f in flows):.1e}, down to "
        f"{LAW_UNTIL:.0e} of the start. The gap ½(‖A‖² + ‖B‖²) − ‖ABᵀ‖_* ends at no more than "
        f"{max(f['course'][-1]['gap'] for f in decaying):.1e} with λ > 0; without decay it stays at "
        f"{min(f['course'][-1]['gap'] for f in flows if f['strength'] == 0):.2f} or more. At most "
        f"{max(f['bound_used'] for f in flows):.2f} of its bound √‖AᵀA − BᵀB‖_*·(‖A‖_* + ‖B‖_*)/2 is used on the way.",
        "With the loss ‖ABᵀ − M‖² without its ½, as a figure of the paper prints it, λ = 0.5 takes off λ/2: the "
        "singular values end within "
        f"{_largest(unhalved, 'thresholded'):.1e} of max(s − λ/2, 0).",
        f"Two scalars: AdamW with ε = {large['epsilon']:g} and decay {DECAYS[large['epsilon']]:g} ends "
        f"{large['distance']:.4f} from Adam with "
        f"L2 of strength ελ = {large['strength']:g}; with ε = {small['epsilon']:g} a decay of "
        f"{DECAYS[small['epsilon']]:g} ends "
        f"{_from_optimum(small):.1e} from the minimum without any decay (it circles its fixed point in steps as long "
        "as its rate, so the "
        "table's last column is not small there). As products of two factors, with the large ε, AdamW ends at "
        f"{_point(product['AdamW']['end'])} and Adam with L2 at {_point(product['Adam + L2']['end'])}; the minimum "
        "with L1 on the product "
        f"is {_point(product['solution'])}.",
    ]


def _largest(flows: list[Found], key: str) -> float:
    return max(abs(x - y) for found in flows for x, y in zip(found["end"], found[key]))


def _point(w: Sequence[float]) -> str:
    return "(" + ", ".join(f"{x:.4f}" for x in w) + ")"


def _from_optimum(found: Found) -> float:
    return sum((x - y) ** 2 for x, y in zip(found["AdamW"]["end"], OPTIMUM)) ** 0.5


def singular_table(flows: list[Found]) -> Found:
    """Return the final singular values beside both predictions."""
    columns = [
        "λ",
        "s of M",
        "max(s − λ, 0)",
        "L2 on the factors (problem 1)",
        "nuclear norm (problem 1)",
        "largest error over problems",
    ]
    rows = []
    for strength in STRENGTHS:
        alike = [found for found in flows if found["strength"] == strength]
        for at, value in enumerate(SINGULAR_VALUES):
            wanted = alike[0]["thresholded"][at]
            error = max(abs(found["end"][at] - wanted) for found in alike)
            rows.append([strength, value, round(wanted, 12), alike[0]["end"][at], alike[0]["nuclear"][at], error])
    return {"title": "Singular values", "columns": columns, "rows": rows}


def law_table(flows: list[Found], unhalved: list[Found]) -> Found:
    """Return how well the balance follows its law, and how much of the bound the gap of the norms uses."""
    columns = ["loss", "λ", "largest relative error of e^(−2λt)", "final norm gap (mean)", "largest share of the bound"]
    rows = []
    for name, group in (("½‖ABᵀ − M‖²", flows), ("‖ABᵀ − M‖²", unhalved)):
        for strength in sorted({found["strength"] for found in group}):
            alike = [found for found in group if found["strength"] == strength]
            gap = sum(found["course"][-1]["gap"] for found in alike) / len(alike)
            rows.append([name, strength, max(f["law_error"] for f in alike), gap, max(f["bound_used"] for f in alike)])
    return {"title": "Balance and norms", "columns": columns, "rows": rows}


def scalar_table(paths: list[Found]) -> Found:
    """Return where both optimizers end."""
    columns = [
        "parameters",
        "ε",
        "AdamW's λ",
        "L2's ελ",
        "AdamW ends",
        "Adam + L2 ends",
        "minimum with L2 or L1",
        "distance",
        "fixed point off by",
    ]
    rows = []
    for found in paths:
        ends = [_point(w) for w in (found["AdamW"]["end"], found["Adam + L2"]["end"], found["solution"])]
        kind = "products a·b" if found["factorised"] else "scalars w"
        rows.append(
            [
                kind,
                found["epsilon"],
                DECAYS[found["epsilon"]],
                found["strength"],
                *ends,
                found["distance"],
                found["residual"],
            ]
        )
    return {"title": "Two scalars", "columns": columns, "rows": rows}


def flow_charts(flows: list[Found]) -> list[Found]:
    """Return the charts of the gradient flow of one problem."""
    gap, balance = "½(‖A‖² + ‖B‖²) − ‖ABᵀ‖_*", "‖AᵀA − BᵀB‖"
    over_time = {"x": "time t", "series": "curve"}
    return [
        {
            "title": "Soft thresholding: s → max(s − λ, 0)",
            "x": "singular value of M",
            "y": "after training",
            "series": "λ",
            "data": _thresholds(flows),
            "points": True,
        },
        {
            "title": "Balance against its law",
            "y": balance,
            "data": _balances(flows, balance),
            "log_y": True,
            **over_time,
        },
        {"title": "L2 approaches the nuclear norm", "y": gap, "data": _gaps(flows, gap), "log_y": True, **over_time},
        {
            "title": "Singular values over time, λ = 0.5",
            "y": "singular value",
            "data": _singular_courses(next(found for found in flows if found["strength"] == 0.5)),
            **over_time,
        },
    ]


def _thresholds(flows: list[Found]) -> list[Found]:
    return [
        {"singular value of M": s, "after training": end, "λ": f"{found['strength']:g}"}
        for found in flows
        for s, end in zip(SINGULAR_VALUES, found["end"])
    ]


def _balances(flows: list[Found], name: str) -> list[Found]:
    return [
        {"time t": point["time"], name: point[key], "curve": f"λ = {found['strength']:g}, {words}"}
        for found in flows
        for words, key in (("flow", "balance"), ("e^(−2λt)", "law"))
        for point in found["course"][:: 1 if found["strength"] else 8]
        if point["law"] > 1e-8
    ]


def _gaps(flows: list[Found], name: str) -> list[Found]:
    return [
        {"time t": point["time"], name: point["gap"], "curve": f"λ = {found['strength']:g}"}
        for found in flows
        for point in found["course"]
        if point["gap"] > 1e-10
    ]


def _singular_courses(found: Found) -> list[Found]:
    return [
        {"time t": point["time"], "singular value": value, "curve": f"s = {s:g} → {max(s - found['strength'], 0):g}"}
        for point in found["course"]
        if point["time"] <= 20
        for s, value in zip(SINGULAR_VALUES, point["singular"])
    ]


def scalar_charts(paths: list[Found]) -> list[Found]:
    """Return the paths of the two scalars at the smallest and the largest ε."""
    charts = []
    for factorised, words in ((False, "scalars"), (True, "products of two factors")):
        data = [
            {"w₁": x, "w₂": y, "optimizer": f"{kind}, ε = {found['epsilon']:g}"}
            for found in paths
            if found["factorised"] == factorised and found["epsilon"] in (min(DECAYS), max(DECAYS))
            for kind in ("AdamW", "Adam + L2")
            for x, y in found[kind]["path"]
        ]
        charts.append({"title": f"Two {words}: the paths", "x": "w₁", "y": "w₂", "series": "optimizer", "data": data})
    return charts


def settings(seeds: int) -> Found:
    """Return everything that the figures depend on."""
    flow_settings = {
        "singular_values": SINGULAR_VALUES,
        "strengths": STRENGTHS,
        "shape": SHAPE,
        "time": TIME,
        "step": STEP,
    }
    scalars = {
        "optimum": OPTIMUM,
        "curvature": CURVATURE,
        "decay_by_epsilon": {f"{e:g}": d for e, d in DECAYS.items()},
        "steps": ADAM_STEPS,
    }
    return {"problems": seeds, "flow": flow_settings, "two_scalars": scalars, "precision": "float64, CPU"}
