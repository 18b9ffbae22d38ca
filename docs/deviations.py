"""Write docs/results/deviations.md: standard deviations over seeds, beside those that the NeuTRENO paper publishes.

python docs/deviations.py            write the page
python docs/deviations.py --check    write nothing; exit with 1 if the page is not current

A kept mean has Student's interval over its seeds, from which the standard deviation follows.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "deviations.md"
HEAD = ("table", "published: plain", "NeuTRENO", "gain in deviations")
HEAD += ("ours: plain", "NeuTRENO", "gain in deviations", "seeds", "study")
INTRODUCTION = f"""# Standard deviations over seeds

Nguyen et al. 2023 (arXiv 2312.00751, tables 9 to 11) publish the standard deviations of five runs of each model. Here
they stand beside those of the kept studies, whose models are far smaller: mean ± standard deviation over seeds, and the
gain in deviations of a single run (the mean of both arms' deviations). A gain of many deviations shows in one run of
each arm; one near 1 needs pairs of seeds, as [compare](../compare.md) trains them.

| {" | ".join(HEAD)} |
| {" | ".join("---:" if name in ("gain in deviations", "seeds") else "---" for name in HEAD)} |
"""


@dataclass(frozen=True)
class Row:
    """A published pair of means and deviations, and the kept arms and outcome that stand for it."""

    table: str
    plain: tuple[float, float]
    method: tuple[float, float]
    study: str
    outcome: str
    arm: str
    against: str = "baseline"
    # what shares are multiplied by
    factor: float = 100.0


MULTI, SINGLE = "multi-scale/miou", "test/miou"
ROWS = (
    Row("9: top-1, %", (72.17, 0.07), (73.01, 0.09), "neutreno-cifar", "test/accuracy", "NeuTRENO(strength=0.6)"),
    Row("9: top-5, %", (91.02, 0.04), (91.56, 0.05), "neutreno-cifar", "test/top5", "NeuTRENO(strength=0.6)"),
    Row(
        "9: top-1, adapted, %",
        (72.17, 0.07),
        (72.63, 0.07),
        "neutreno-cifar",
        "test/accuracy",
        "NeuTRENO(strength=0.0 -> 0.6 over 20%) | adapt=true",
        "baseline | adapt=true",
    ),
    Row(
        "9: top-1, both with FeatScale, %",
        (72.346, 0.06),
        (73.23, 0.08),
        "neutreno-cifar",
        "test/accuracy",
        "NeuTRENO(strength=0.6) + FeatScale()",
        "FeatScale()",
    ),
    Row(
        "10: mean IoU, one scale, %",
        (35.72, 0.57),
        (37.24, 0.62),
        "neutreno-segmentation",
        SINGLE,
        "NeuTRENO(strength=0.6) @ encoder",
    ),
    Row(
        "10: mean IoU, scales, %",
        (36.68, 0.42),
        (38.06, 0.54),
        "neutreno-segmentation",
        MULTI,
        "NeuTRENO(strength=0.6) @ encoder",
    ),
    Row(
        "11: validation perplexity",
        (33.15, 0.07),
        (32.60, 0.08),
        "neutreno-lm",
        "validation/perplexity",
        "NeuTRENO(strength=0.4)",
        factor=1.0,
    ),
    Row(
        "11: test perplexity",
        (34.29, 0.09),
        (33.70, 0.07),
        "neutreno-lm",
        "test/perplexity",
        "NeuTRENO(strength=0.4)",
        factor=1.0,
    ),
)


def kept(study: str, arm: str, outcome: str) -> tuple[float, float, int]:
    """Return the mean of an arm's outcome, its standard deviation over seeds, and their number.

    Raises:
        LookupError: if the study did not keep it.
    """
    with (RESULTS / study / "table.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["arm"] == arm and row["outcome"] == outcome:
                seeds = int(row["finished"])
                half = (float(row["high"]) - float(row["low"])) / 2
                return float(row["mean"]), half * math.sqrt(seeds) / float(stats.t.ppf(0.975, seeds - 1)), seeds
    raise LookupError(f"{study} keeps no {outcome} of {arm}")


def line(row: Row) -> str:
    """Return the row of the page."""
    plain, method = kept(row.study, row.against, row.outcome), kept(row.study, row.arm, row.outcome)
    ours = [(mean * row.factor, deviation * row.factor) for mean, deviation, _ in (plain, method)]
    cells = [row.table, *_cells(row.plain, row.method), *_cells(*ours), str(method[2])]
    return f"| {' | '.join(cells)} | [{row.study}]({row.study}/README.md) |"


def _cells(plain: tuple[float, float], method: tuple[float, float]) -> list[str]:
    gain = (method[0] - plain[0]) / ((plain[1] + method[1]) / 2)
    words = f"{gain:+.1f}".replace("-", "−")
    # 28.845 % is 28.85 % on the study's page, too
    return [*(f"{round(mean, 6) + 1e-9:.2f} ± {deviation:.2f}" for mean, deviation in (plain, method)), words]


def main() -> None:
    """Read the command line and write the page, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not current")
    text = INTRODUCTION + "\n".join(map(line, ROWS)) + "\n\nWritten by `python docs/deviations.py`.\n"
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif text != (PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""):
        sys.exit(f"{PAGE} is not current. Run: python docs/deviations.py")


if __name__ == "__main__":
    main()
