"""Run examples/twenty_lines.py and print its results: the loss, the health of the heads, and next steps.

python docs/twenty_lines.py
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "twenty_lines.py"
SHOWN = {"entropy_share": "entropy share", "max_logit": "largest logit"}
NEXT = """\
Entropy share: 1 is attention to all tokens alike, 0 to a single one.
Largest logit: above 100 a head is unhealthy. Means over the heads of a layer.

Next, a fair comparison on real data, in a minute:
    .venv/bin/headwise compare digits --method "DropHead(p=0.2)" \\
        --seeds 2 --epochs 2 --out results/first
    then open results/first/report.html
In your own training loop: docs/training_script.md"""


def health(records: list[dict[str, Any]]) -> str:
    """Return a table with a row per layer: the mean over heads of each statistic at the first and last reading."""
    steps = sorted({record["step"] for record in records})
    first, last = steps[0], steps[-1]
    lines = [
        "layer " + "".join(f"{name:^24}" for name in SHOWN.values()).rstrip(),
        "      " + "".join(f"{f'step {step}':>12}" for _ in SHOWN for step in (first, last)),
    ]
    for depth in sorted({record["depth"] for record in records if record["depth"] is not None}):
        cells = []
        for statistic in SHOWN:
            for step in (first, last):
                heads = [
                    record["value"]
                    for record in records
                    if (record["statistic"], record["depth"], record["step"]) == (statistic, depth, step)
                    and record["head"] is not None
                ]
                cells.append(f"{sum(heads) / len(heads):>12.3f}")
        lines.append(f"{depth:<6}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Run the example and print its results."""
    namespace: dict[str, Any] = runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = namespace["losses"]
    print(f"\nloss before {losses[0]:.2f}, after {len(losses)} steps {losses[-1]:.2f}\n")
    print(health(namespace["watch"].records()))
    print(NEXT)


if __name__ == "__main__":
    main()
