"""The words, claims and the table of what NeuTRENO costs."""

from __future__ import annotations

from typing import Any

# a ratio within it counts as 1.00: of what is counted, and of what a clock measures beside other programs
COUNTED, TIMED = 0.005, 0.05
SOURCE = "Nguyen et al. 2023, arXiv 2312.00751, G.4"


def judged(one: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Return the published ratios with ours and a verdict each; that of the time by its interval."""
    low, high = one["interval"]
    if low is None or low < 1 - TIMED < high or low < 1 + TIMED < high:
        timed, why = "undecided", f"the interval crosses 1 ± {TIMED:g}"
    else:
        timed, why = (
            ("as published", f"within 1 ± {TIMED:g}")
            if 1 - TIMED <= low <= 1 + TIMED
            else ("contrary", f"outside 1 ± {TIMED:g}")
        )
    memory = f"{one['memory']:.4f}, weights included; {one['activations']:.4f} without them"
    figures = {
        "operations": (f"{one['operations']:.4f}", _counted(one["operations"])),
        "memory": (memory, _counted(one["memory"])),
        "time": (f"{one['time']:.3f} {_interval(one)} over {rounds} rounds", (timed, why)),
    }
    return [_claim(what, one["batch"], ours, told) for what, (ours, told) in figures.items()]


def _counted(ratio: float) -> tuple[str, str]:
    return ("as published", "") if abs(ratio - 1) < COUNTED else ("contrary", f"not 1.00 within {COUNTED:g}")


def _claim(what: str, batch: int, ours: str, told: tuple[str, str]) -> dict[str, Any]:
    form = "one image at a time" if batch == 1 else f"in batches of {batch} images"
    return {
        "text": f"In inference NeuTRENO takes the {what} of the plain model, {form}.",
        "source": SOURCE,
        "published": {"ratio per sample": "≈ 1.00"},
        "ours": ours,
        "verdict": told[0],
        "why": told[1],
    }


def _interval(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return "" if low is None else f"[{low:.3f}, {high:.3f}]"


def paragraphs(measured: list[dict[str, Any]]) -> list[str]:
    """Return the sentences of the findings, the answer first."""
    one, many = measured[0], measured[-1]
    return [
        f"For one image NeuTRENO takes {one['operations']:.4f} times the operations of the plain model, "
        f"{one['memory']:.3f} times the memory and "
        f"{one['time']:.3f} times the time {_interval(one)}; in batches of {many['batch']} images "
        f"{many['memory']:.3f} times the memory and "
        f"{many['time']:.3f} times the time {_interval(many)}.",
        "Operations are those of matrix products and attention, by torch's counter; NeuTRENO adds none of these. What "
        "it adds is element-wise: "
        f"{one['others']:.2f} times the elements that all other operations write. Beside them the calls of the method "
        "and of its host take time, "
        "which counts most for one image.",
        "Memory is the most that one forward holds beside its input, with the weights; the first layer's values are "
        "held until the last layer.",
        f"A count agrees within {COUNTED:g}, a time where its interval lies within {TIMED:g} of 1. The publication "
        "gives the ratios and not what it "
        "counts as memory, nor how many samples it takes at once.",
    ]


def table(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of both forms and their ratios."""
    columns = [
        "images",
        "operations (10⁹)",
        "ratio",
        "other elements (10⁶)",
        "ratio",
        "memory of a forward (MiB)",
        "ratio, with weights",
    ]
    rows = []
    for one in measured:
        before, after = one["before"], one["after"]
        rows.append(
            [
                one["batch"],
                *(f"{before.flops / 1e9:.3f} → {after.flops / 1e9:.3f}", f"{one['operations']:.4f}"),
                *(f"{before.others / 1e6:.2f} → {after.others / 1e6:.2f}", f"{one['others']:.3f}"),
                *(f"{before.memory / 2**20:.2f} → {after.memory / 2**20:.2f}", f"{one['memory']:.3f}"),
                f"{one['time']:.3f} {_interval(one)}",
            ]
        )
    return {"title": "Plain → NeuTRENO", "columns": [*columns, "time, ratio [95 %]"], "rows": rows}
