"""A study of pretrained attention: are its factors balanced, and its Frobenius and nuclear norms nearly identical?

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, show this for LLaMA-2 7B and attribute it to weight decay. Here
stories260K and all-MiniLM-L6-v2 are compared with random weights of the same shapes, and with their own weights with
one factor rotated. `headwise audit` computes the same figures of any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise_papers.decay_pretrained.models import MODELS, compare, drawn, load, rotated
from headwise_papers.findings import findings

if TYPE_CHECKING:
    from headwise.health.auditing.weights import Compared

TITLE = "Balance and nuclear norms of pretrained attention"
QUESTION = (
    "In pretrained models, are the norms of rows of W_Q and W_K, of W_V and P, and the Frobenius and nuclear norms of "
    "every head nearly identical, and more so than in random weights of the same shapes?"
)
LABELS = {
    "apart": "mean difference, share of the mean",
    "random": "mean difference in random weights",
    "rotated": "mean difference with one factor rotated",
    "correlation": "correlation",
    "chance": "correlation in random weights",
}
NOTES = (
    "Random weights of one size are nearly balanced anyway: their rows have about the same norm and, in a wide "
    "layer, nearly right angles. Nearly identical norms are therefore no evidence of weight decay; "
    "random weights lack the correlation.",
    "A rotation of one factor keeps all norms and spectra of the factors; if the norms of the model are nearer to "
    "equal, training has aligned the factors.",
    "stories260K has rotary positions between queries and keys, where only the traces of rotary pairs would "
    "balance, and its heads share keys and values in pairs; MiniLM was distilled and fine-tuned, with a weight decay "
    "that is not known here. No claim is therefore judged on them; decay-vit judges them on models whose decay is "
    "known.",
)
# largest numbers of points in a chart, for a pretrained and a random model
POINTS = (250, 100)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
    data: Path | None = None,
) -> dict[str, Any]:
    """Return the findings on both models and on `seeds` draws of each reference (default 10).

    `jobs` and `device` have no effect.
    """
    say, seeds = progress or (lambda text: None), seeds or 10
    figures: dict[str, list[dict[str, float]]] = {}
    charts = []
    for model in MODELS:
        say(f"reading {model}")
        products = load(model, data, say)
        random = [compare([drawn(one, seed, at) for at, one in enumerate(products)]) for seed in range(seeds)]
        turned = [compare([rotated(one, seed, at) for at, one in enumerate(products)]) for seed in range(seeds)]
        for key, own in compare(products).items():
            name = subject(model, own)
            figures[name] = [_figures(own, one[key], two[key]) for one, two in zip(random, turned, strict=True)]
            charts.append(_chart(name, model, own, random[0][key]))
    return findings(
        "decay-pretrained",
        TITLE,
        QUESTION,
        figures,
        (),
        labels=LABELS,
        notes=NOTES,
        charts=charts,
        settings={
            "models": ", ".join(MODELS),
            "draws": seeds,
            "random weights": "normal, one standard deviation for all",
            "rotated": "rows of keys (of values) of a head turned by one random rotation",
        },
    )


def subject(model: str, comparison: Compared) -> str:
    """Return the name of a comparison: its product, model and norms."""
    from headwise.health.auditing.weights import PRODUCTS

    return f"{PRODUCTS[comparison['product']]} of {model}, {comparison['first']} against {comparison['second']}"


def _figures(own: Compared, random: Compared, turned: Compared) -> dict[str, float]:
    deviations = {"apart": own["deviation"], "random": random["deviation"], "rotated": turned["deviation"]}
    return deviations | {"correlation": own["correlation"], "chance": random["correlation"]}


def _chart(name: str, model: str, own: Compared, random: Compared) -> dict[str, Any]:
    """Return the chart of pairs of norms, divided by their mean, of the model and of one draw of random weights."""
    first, second = f"{own['first']} / mean", f"{own['second']} / mean"
    data = []
    for weights, one, most in ((model, own, POINTS[0]), ("random weights", random, POINTS[1])):
        pairs = one["pairs"]
        mean = sum(x + y for x, y in pairs) / (2 * len(pairs))
        for x, y in pairs[:: -(-len(pairs) // most)]:
            data.append({first: float(f"{x / mean:.3g}"), second: float(f"{y / mean:.3g}"), "weights": weights})
    caption = f"Mean difference {own['deviation']:.1%}, of random weights {random['deviation']:.1%}."
    drawn_as = {"x": first, "y": second, "series": "weights", "points": True}
    return {"title": name, **drawn_as, "data": data, "caption": caption}
