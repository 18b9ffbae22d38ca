"""The theory of NeuTRENO, in numbers: attention as a random walk and as descent on J, without and with the fidelity
term; no training.

Nguyen et al. 2023, arXiv 2312.00751, sections 2 and 3. One layer's queries and keys are random and stay as they are,
and its values go through it again and again: u ← Au + λ(u⁰ − u), with λ = 0 for softmax attention. A = softmax(kkᵀ/√d)
is the paper's symmetric case, softmax(qkᵀ/√d) attention itself. Everything in float64 on the CPU, whatever the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_papers.neutreno_theory import presentation
from headwise_papers.neutreno_theory.passes import DEPTH, KINDS, SIZE, STRENGTHS, TOKENS, measure

TITLE = "NeuTRENO's theory: where tokens go without and with the fidelity term"
QUESTION = (
    "Do tokens that pass through the same attention again and again all become the stationary mean of its random "
    "walk, and does the "
    "fidelity term prevent it?"
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Check every statement on `seeds` random layers (10 by default) and return the findings; `jobs` and `device`
    change nothing."""
    say, seeds = progress or (lambda text: None), seeds or 10
    found = []
    for seed in range(seeds):
        say(f"random layer {seed + 1} of {seeds}")
        found += [measure(seed, kind) for kind in KINDS]
    claims = presentation.judged(found)
    return {
        "kind": "findings",
        "name": "neutreno-theory",
        "scale": "small",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": presentation.paragraphs(found, claims),
        "tables": [presentation.statements(found), presentation.strengths(found)],
        "charts": [presentation.chart(found)],
        "claims": claims,
        "settings": {
            "layers": seeds,
            "tokens": TOKENS,
            "size of a head": SIZE,
            "passes": DEPTH,
            "strengths": list(STRENGTHS),
        },
    }
