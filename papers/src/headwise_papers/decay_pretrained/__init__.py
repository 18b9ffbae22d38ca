"""Pretrained attention: are its factors balanced, and its Frobenius and nuclear norms nearly identical, as weight decay
would have them?

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, show so of LLaMA-2 7B. Here stories260K and all-MiniLM-L6-v2
stand beside random weights of the same shapes, and beside their own weights with one factor rotated. `headwise audit`
reads the same of any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_papers.decay_pretrained import presentation
from headwise_papers.decay_pretrained.models import MODELS, compare, drawn, load, rotated

TITLE = "Balance and nuclear norms of pretrained attention"
QUESTION = (
    "In pretrained models, are the norms of rows of W_Q and W_K, of W_V and P, and the Frobenius and nuclear norms of "
    "every head nearly "
    "identical, and more so than in random weights of the same shapes?"
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
    data: Path | None = None,
) -> dict[str, Any]:
    """Read both models, and `seeds` draws of each reference (10 by default), and return the findings; `jobs` and
    `device` change nothing."""
    say, seeds = progress or (lambda text: None), seeds or 10
    rows: list[presentation.Row] = []
    for model in MODELS:
        say(f"reading {model}")
        products = load(model, data, say)
        own = compare(products)
        random = [compare([drawn(one, seed, at) for at, one in enumerate(products)]) for seed in range(seeds)]
        turned = [compare([rotated(one, seed, at) for at, one in enumerate(products)]) for seed in range(seeds)]
        rows += [
            presentation.Row(model, one, tuple(x[key] for x in random), tuple(x[key] for x in turned))
            for key, one in own.items()
        ]
    return {
        "kind": "findings",
        "name": "decay-pretrained",
        "scale": "small",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": presentation.paragraphs(rows, seeds),
        "tables": [presentation.table(rows)],
        "charts": [presentation.chart(row) for row in rows],
        "claims": [claim.model_dump(mode="json") for claim in presentation.claims(rows)],
        "settings": {
            "models": ", ".join(MODELS),
            "draws": seeds,
            "random weights": "normal, one standard deviation for all",
            "rotated": "rows of keys (of values) of a head turned by one random rotation",
        },
    }
