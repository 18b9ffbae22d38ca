"""Time and memory on a GPU against plain fused attention, eager and compiled: bf16, forward + backward.

make bench-cuda                                 # T = 256 … 16384
make bench-cuda ARGS="--only readings"
make bench-cuda ARGS="--only methods --tokens 1024,16384 --compiled 16384"
python benchmarks/on_cuda.py --dry-run             # tiny shapes on the CPU: tests that it runs, measures nothing
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from attention import FIRST, SECOND
from timing import interleave, machine, ratio
from torch import Tensor

from headwise.attend.attention.largest_logits import largest_logits
from headwise.health.statistics import Reading, read
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

SHAPES = ((32, 12, 256, 64), (8, 12, 1024, 64), (4, 12, 4096, 64), (1, 12, 16384, 64))
TINY = ((2, 2, 16, 16), (1, 2, 64, 16))
# of the time of plain attention at the longest sequence: methods on the fused kernel, penalties; of a forward: a full
# reading
GOALS = {"first": 1.03, "second": 2.0, "reading": 2.0}


class Case:
    """The tensors of one shape, and the computations that are compared on them."""

    def __init__(self, shape: tuple[int, ...], causal: bool, device: str, dtype: torch.dtype) -> None:
        self.q, self.k, self.v, self.first = (
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(4)
        )
        self.grad, self.causal, self.scale = torch.randn(shape, device=device, dtype=dtype), causal, shape[-1] ** -0.5

    def plain(self, attend: Callable[..., Tensor]) -> None:
        """Run plain attention forward and backward."""
        attend(self.q, self.k, self.v, is_causal=self.causal).backward(self.grad)

    def method(self, run: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """Run a method forward and backward, including its penalty."""
        out, penalty = run(self.q, self.k, self.v)
        torch.autograd.backward([out, penalty], [self.grad, None]) if penalty.requires_grad else out.backward(self.grad)

    def fitted(self, method) -> Callable[..., tuple[Tensor, Tensor]]:
        """Fit a method onto a site of this shape and return its forward."""
        fitted = fit_standalone([method], standalone_site(self.q, self.k), first_values=self.first)
        # what a method learns
        fitted.site.module.to(self.q.device, self.q.dtype)
        return partial(attend_with, [method], fitted=fitted, causal=self.causal)


def memory(run: Callable[[], None], device: str) -> float:
    """Return the peak of bytes above the level before; nan on a CPU, which does not count them."""
    if device == "cpu":
        return float("nan")
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def methods(shapes, rounds: int, device: str, dtype: torch.dtype, compiled: tuple[int, ...] | None) -> None:
    """Print time and memory of every method over plain attention, eager over eager and compiled over compiled.

    `compiled`: the numbers of tokens at which it is compiled too; None: all.
    """
    for causal in (False, True):
        print(f"\n### {'causal' if causal else 'non-causal'}, forward + backward, {str(dtype).split('.')[1]}\n")
        print(
            "| method | shape | time / plain | compiled | memory / plain | goal at the longest | meets "
            "|\n|---|---|---|---|---|---|---|"
        )
        for kind, group in (("first", FIRST), ("second", SECOND)):
            for method in group:
                for shape in shapes:
                    print(
                        _row(
                            method,
                            GOALS[kind] if shape in (SHAPES[-1], TINY[-1]) else None,
                            Case(shape, causal, device, dtype),
                            rounds,
                            device,
                            compiled is None or shape[2] in compiled,
                        ),
                        flush=True,
                    )


def _row(method, goal: float | None, case: Case, rounds: int, device: str, compiled: bool) -> str:
    run = case.fitted(method)
    eager = {"plain": partial(case.plain, F.scaled_dot_product_attention), "method": partial(case.method, run)}
    over = ratio(interleave(eager, rounds), "method", "plain")
    used = memory(eager["method"], device) / memory(eager["plain"], device)
    faster = f"{_compiled(case, run, rounds, device):.2f}" if compiled else "-"
    meets = "-" if goal is None or device == "cpu" else "yes" if over <= goal else "NO"
    return f"| {method!r} | {tuple(case.q.shape)} | {over:.2f} | {faster} | {used:.2f} | {goal or '-'} | {meets} |"


def _compiled(case: Case, run: Callable[..., tuple[Tensor, Tensor]], rounds: int, device: str) -> float:
    torch._dynamo.reset()
    # A dry run tests whether it can be traced, which needs no compiler.
    compiles = partial(torch.compile, backend="eager" if device == "cpu" else "inductor")
    compiled = {
        "plain": partial(case.plain, compiles(lambda q, k, v, **more: F.scaled_dot_product_attention(q, k, v, **more))),
        "method": partial(case.method, compiles(run)),
    }
    return ratio(interleave(compiled, rounds), "method", "plain")


def readings(shapes, rounds: int, device: str, dtype: torch.dtype) -> None:
    """Print the time of a full reading, and of QKClip's maximum, over a fused forward."""
    print(
        f"\n### over a fused forward\n\n| shape | causal | full reading (goal {GOALS['reading']}) | QKClip's maximum "
        "|\n|---|---|---|---|"
    )
    for shape in shapes:
        for causal in (False, True):
            case = Case(shape, causal, device, dtype)
            q, k, v = (x.detach() for x in (case.q, case.k, case.v))
            runs = {
                "forward": lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
                "reading": lambda q=q, k=k, v=v, c=causal: read(Reading(q, k, v, causal=c)),
                "maximum": lambda q=q, k=k, c=causal, s=case.scale: largest_logits(q, k, None, c, s),
            }
            times = interleave(runs, rounds)
            print(
                f"| {shape} | {causal} | {ratio(times, 'reading', 'forward'):.1f} | "
                f"{ratio(times, 'maximum', 'forward'):.1f} |",
                flush=True,
            )


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list that commas separate."""
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["methods", "readings"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=numbers, help="the sequence lengths that are measured, as 1024,16384")
    parser.add_argument("--compiled", type=numbers, help="those at which the methods are compiled too; default: all")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available: not run")
    torch.manual_seed(0)
    device, dtype, shapes = ("cpu", torch.float32, TINY) if options.dry_run else ("cuda", torch.bfloat16, SHAPES)
    print(machine(torch.get_num_threads()), "(a dry run: these are not measurements)" if options.dry_run else "")
    shapes = tuple(shape for shape in shapes if options.tokens is None or shape[2] in options.tokens)
    if not shapes:
        raise SystemExit(f"no shape has {options.tokens} tokens: they have {[shape[2] for shape in SHAPES]}")
    for name, part in {"methods": partial(methods, compiled=options.compiled), "readings": readings}.items():
        if options.only in (None, name):
            part(shapes, 1 if options.dry_run else options.rounds, device, dtype)


if __name__ == "__main__":
    main()
