"""Time and memory of the methods against plain fused attention and against their textbook form.

make bench                               # all of it, two threads
make bench ARGS="--only table --rounds 15"
# on a shared machine
make bench ARGS="--only causal --threads 1 --clock cpu --methods DropKey,DropAttention"
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
import torch.nn.functional as F
from memory import memory
from parts import decorrelation, model_step, packed_step, qk_clip
from timing import CLOCKS, interleave, machine, ratio

from headwise.attend.methods import (
    AttentionNormPenalty,
    AttnScale,
    DropAttention,
    DropColumn,
    DropHead,
    DropKey,
    EntropyPenalty,
    NeuTRENO,
    RelaxedAttention,
    ValueResidual,
)
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

FIRST = [
    DropColumn(),
    DropAttention(),
    DropKey(unit="column"),
    DropHead(),
    RelaxedAttention(),
    AttnScale(),
    NeuTRENO(),
    ValueResidual(),
]
SECOND = [AttentionNormPenalty(), EntropyPenalty()]
SHAPES = {"B64 H5 T65 d64": (64, 5, 65, 64), "B8 H12 T256 d64": (8, 12, 256, 64), "B2 H12 T1024 d64": (2, 12, 1024, 64)}
# For causal attention the bars of T = 256 and 1024 apply to these three.
CAUSAL = (DropAttention, DropKey, RelaxedAttention)
BARS = {"first": (1.35, 1.20, 1.06), "second": (1.5, 1.8, 2.25), "twin": (1.1, 1.05, 1.0)}


def variants(method, shape, causal: bool) -> dict[str, Callable[[], object]]:
    """Return the three computations of one row (plain, the method, its textbook form), and plain again for the
    spread."""
    q, k, v, first = (torch.randn(shape, requires_grad=True) for _ in range(4))
    grad = torch.randn(shape)
    fitted = fit_standalone([method], standalone_site(q, k), first_values=first)

    def plain() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(grad)

    def with_method(form: str) -> None:
        out, penalty = attend_with([method], q, k, v, form=form, fitted=fitted, causal=causal)
        if penalty.requires_grad:
            torch.autograd.backward([out, penalty], [grad, None])
        else:
            out.backward(grad)

    found = {"plain": plain, "method": partial(with_method, "fast"), "plain again": plain}
    if (
        type(method).matrix_free()
        and any(type(method).overrides(s) for s in ("logits", "weights", "read"))
        and shape[2] <= 4096
    ):
        found["textbook"] = partial(with_method, "textbook")
    return found


def table(options: argparse.Namespace, causal: bool) -> None:
    """Print time / plain, time / textbook and the spread of plain against itself, for every method and shape."""
    print(f"\n### {'causal' if causal else 'non-causal'}, forward + backward\n")
    print("| method | shape | / plain | bar | / textbook | bar | plain / itself (middle half) | meets |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, methods in (("first", FIRST), ("second", SECOND)):
        for method in chosen(options, methods):
            for i, (name, shape) in enumerate(SHAPES.items()):
                times = interleave(variants(method, shape, causal), options.rounds, clock=options.clock)
                over, spread = ratio(times, "method", "plain"), _spread(times)
                twin = ratio(times, "method", "textbook") if "textbook" in times else None
                bar, twin_bar = BARS[kind][i], BARS["twin"][i]
                slack = max(0.0, spread[1] - 1)
                has_bar = not causal or (isinstance(method, CAUSAL) and i > 0)
                meets = "-" if not has_bar else _yes(over <= bar + slack and (twin is None or twin <= twin_bar + slack))
                shown = f"{twin:.2f} | {twin_bar}" if twin is not None else "- | -"
                print(
                    f"| {method!r} | {name} | {over:.2f} | {bar} | {shown} | {spread[0]:.2f}-{spread[1]:.2f} | "
                    f"{meets} |",
                    flush=True,
                )


def chosen(options: argparse.Namespace, methods=FIRST + SECOND) -> list:
    """Return the methods whose rows are requested."""
    return [m for m in methods if options.methods is None or type(m).__name__ in options.methods.split(",")]


def _spread(times: dict[str, list[float]]) -> tuple[float, float]:
    ratios = sorted(a / b for a, b in zip(times["plain again"], times["plain"], strict=True))
    return ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]


def _yes(condition: bool) -> str:
    return "yes" if condition else "NO"


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["table", "causal", "memory", "qkclip", "decorrelation", "step", "packed"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="of the tables; cpu: processor time")
    parser.add_argument("--methods", help="names separated by commas: the rows of the tables")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine(options.threads))
    parts = {
        "table": lambda: table(options, causal=False),
        "causal": lambda: table(options, causal=True),
        "memory": lambda: memory(FIRST + SECOND),
        "qkclip": lambda: qk_clip(options.rounds),
        "decorrelation": lambda: decorrelation(options.rounds),
        "step": lambda: model_step(FIRST, options.rounds),
        "packed": lambda: packed_step(chosen(options), options.rounds, options.clock),
    }
    for name, run in parts.items():
        if options.only in (None, name):
            run()


if __name__ == "__main__":
    main()
