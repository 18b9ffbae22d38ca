"""The factorised toy of weight decay and low rank: L2 on the factors against the nuclear norm on the product.

Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819. Target M with known singular values, ½‖ABᵀ − M‖² + λ/2(‖A‖² +
‖B‖²) under gradient flow (classical Runge–Kutta steps), against ½‖W − M‖² + λ‖W‖_* by proximal gradient steps; then two
scalars under torch's AdamW and Adam with L2, direct and as products of factors. Float64 on the CPU, whatever the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_papers.low_rank_toy import presentation
from headwise_papers.low_rank_toy.adam_paths import DECAYS, two_scalars
from headwise_papers.low_rank_toy.claims import claims
from headwise_papers.low_rank_toy.gradient_flow import STRENGTHS, flow

TITLE = "Weight decay on factors is a nuclear norm on their product"
QUESTION = (
    "Does L2 on the factors A and B act as the nuclear norm on ABᵀ: the same singular values, a balance ‖AᵀA − BᵀB‖ "
    "that decays as "
    "e^{−2λt}, and, for AdamW, only when ε is large?"
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Carry out the toy on `seeds` random problems (5 by default) and return its findings; `jobs` and `device` change
    nothing."""
    say = progress or (lambda text: None)
    seeds = seeds or 5
    flows = []
    for seed in range(seeds):
        say(f"gradient flow, problem {seed + 1} of {seeds}")
        flows += [flow(seed, strength) for strength in STRENGTHS]
    unhalved = [flow(seed, 0.5, loss_factor=2.0) for seed in range(seeds)]
    say("two scalars under AdamW and Adam with L2")
    paths = [two_scalars(epsilon, factorised) for factorised in (False, True) for epsilon in DECAYS]
    return {
        "kind": "findings",
        "name": "low-rank-toy",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": presentation.paragraphs(flows, unhalved, paths, seeds),
        "tables": [
            presentation.singular_table(flows),
            presentation.law_table(flows, unhalved),
            presentation.scalar_table(paths),
        ],
        "charts": presentation.flow_charts([found for found in flows if found["seed"] == 0])
        + presentation.scalar_charts(paths),
        "claims": claims(flows, paths),
        "settings": presentation.settings(seeds),
    }
