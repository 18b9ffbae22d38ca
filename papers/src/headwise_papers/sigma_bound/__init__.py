"""The entropy floor of Theorem 3.1, and how fast spectral norms grow with the width; no data, no training to an end.

Zhai et al. 2023, arXiv 2303.06296. Float64 on the CPU for the floor, whatever the device; a few steps of Adam on random
images for the norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

TITLE = "The entropy floor and the growth of spectral norms"
QUESTION = (
    "Is the entropy floor reached, does the least entropy fall exponentially with the spectral norm, and does "
    "SigmaReparam keep the growth of "
    "spectral norms from depending on the width?"
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
    from headwise_papers.sigma_bound import presentation
    from headwise_papers.sigma_bound.least_entropy import BEYOND, TOKENS, least_entropies
    from headwise_papers.sigma_bound.update_growth import ARMS, WIDTHS, moves

    say, seeds = progress or (lambda text: None), seeds or 10
    least = []
    for tokens in TOKENS:
        say(f"least entropies of {tokens} keys")
        sizes = [size for beyond in BEYOND if (size := math.log(tokens) + beyond) > 0]
        least += [least_entropies(0, tokens, size) for size in sizes]
    moved = []
    for seed in range(seeds):
        say(f"steps of Adam, model {seed + 1} of {seeds}")
        moved += [(arm, seed, width, *moves(seed, width, arm)) for arm in ARMS for width in WIDTHS]
    grown = presentation.exponents(moved)
    return {
        "kind": "findings",
        "name": "sigma-bound",
        "scale": "small",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": presentation.paragraphs(least, grown),
        "claims": presentation.claims(least, grown),
        "tables": [presentation.floor_table(least), presentation.growth_table(moved, grown)],
        "charts": presentation.charts(least, moved),
        "settings": presentation.settings(seeds),
    }
