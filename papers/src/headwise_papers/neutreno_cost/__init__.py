"""What NeuTRENO costs in inference: operations, memory and time of a DeiT-tiny with it, over those of the same model
without; no training.

Nguyen et al. 2023, arXiv 2312.00751, section G.4. DeiT-tiny on images of 224 pixels: 12 layers, width 192, 3 heads, 197
tokens. All figures are ratios of one model's two forms in one run. Times are those of the processor (on a GPU: of the
clock), taken in turns, in every other round the second form first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_papers.neutreno_cost import measuring, presentation

TITLE = "What NeuTRENO costs"
QUESTION = "Does NeuTRENO cost nothing in inference: are operations, memory and time those of the plain model?"


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure both forms, their times in `seeds` rounds (12 by default), and return the findings; `jobs` changes
    nothing."""
    say, rounds = progress or (lambda text: None), seeds or 12
    measured = [measuring.measure(batch, rounds, device, say) for batch in measuring.BATCHES]
    return {
        "kind": "findings",
        "name": "neutreno-cost",
        "scale": "small",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": presentation.paragraphs(measured),
        "tables": [presentation.table(measured)],
        "charts": [],
        "claims": [claim for one in measured for claim in presentation.judged(one, rounds)],
        "settings": {
            **measuring.SHAPE,
            "batches": list(measuring.BATCHES),
            "strength": measuring.STRENGTH,
            "rounds": rounds,
            "device": device,
            "dtype": "float32",
        },
    }
