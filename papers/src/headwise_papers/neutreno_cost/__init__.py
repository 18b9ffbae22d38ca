"""A study of the costs of NeuTRENO in inference: operations, memory and time of a DeiT-tiny with it and without it.

Nguyen et al. 2023, arXiv 2312.00751, section G.4. DeiT-tiny on images of 224 pixels: 12 layers, width 192, 3 heads, 197
tokens; no training. All figures are ratios of the two forms of one model in one run. Times are processor times (on a
GPU: wall-clock times), measured alternately, with the order of the forms reversed every round.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_papers.findings import each, findings
from headwise_papers.neutreno_cost import measuring
from headwise_verdict.results.records import Claim

TITLE = "What NeuTRENO costs"
QUESTION = "Does NeuTRENO cost nothing in inference: are operations, memory and time those of the plain model?"
SOURCE = "Nguyen et al. 2023, arXiv 2312.00751, G.4"
FORMS = {batch: "one image at a time" if batch == 1 else f"in batches of {batch} images" for batch in measuring.BATCHES}
LABELS = {
    "operations": "operations, ratio",
    "others": "elements that other operations write, ratio",
    "memory": "memory with the weights, ratio",
    "activations": "memory without the weights, ratio",
    "time": "time, ratio",
}
# margins within which a ratio counts as 1.00, wider for time, which other programs disturb
WITHIN = {"operations": 0.005, "memory": 0.005, "time": 0.05}
CLAIMS = tuple(
    Claim(
        text=f"In inference NeuTRENO takes the {what} of the plain model, {form}.",
        source=SOURCE,
        published={"ratio per sample": "≈ 1.00"},
        tests=(*each([form], what, "same", 1.0, margin),),
    )
    for form in FORMS.values()
    for what, margin in WITHIN.items()
)
NOTES = (
    "Operations are those of matrix products and attention, by torch's counter; NeuTRENO adds none of these, only "
    "element-wise operations. In addition, the calls of the method and of its host take time, which matters most for "
    "one image.",
    "Memory is the maximum that one forward allocates in addition to its input; the first layer's values are kept "
    "until the last layer. The publication gives the ratios, but not what it counts as memory or its batch size.",
)


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the findings on both forms, with times measured in `seeds` rounds (default 12); `jobs` has no effect."""
    say, rounds = progress or (lambda text: None), seeds or 12
    return findings(
        "neutreno-cost",
        TITLE,
        QUESTION,
        {form: measuring.measure(batch, rounds, device, say) for batch, form in FORMS.items()},
        CLAIMS,
        labels=LABELS,
        notes=NOTES,
        settings={
            **measuring.SHAPE,
            "batches": list(measuring.BATCHES),
            "strength": measuring.STRENGTH,
            "rounds": rounds,
            "device": device,
            "dtype": "float32",
        },
    )
