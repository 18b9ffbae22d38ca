"""A reading of `watch` on a GPU: the time of the device and that of the host apart, for its parts and for a step.

python benchmarks/readings_on_cuda.py             # about half a minute, most of it compilation; a line for each figure
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels_on_cuda import difference, drawn
from torch import Tensor
from training_models import MODELS

import headwise
from headwise.health.statistics import Queries, Reading, RowFigures, read
from headwise.health.statistics.figures_by_kernels import FIGURES, by_kernels
from headwise.health.statistics.squarings import largest_square
from headwise.health.statistics.weights.product import by_eigenvalues

SHAPES = ((8, 12, 1024, 64), (1, 12, 8192, 64))
QUEUED = 10


def both(run: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of a run on the device, and those that the host takes to queue it.

    The device is kept busy until all runs are queued, so that it does not wait for the host between two of them.
    """
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    once = time.perf_counter() - began
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Cycles of a clock of at most 2 GHz.
    torch.cuda._sleep(int(min(3 * QUEUED * once, 0.5) * 2e9))
    first.record()
    began = time.perf_counter()
    for _ in range(QUEUED):
        run()
    host = time.perf_counter() - began
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / QUEUED, host * 1e3 / QUEUED


def made(shape: tuple[int, int, int, int], causal: bool, dtype: torch.dtype = torch.bfloat16) -> Reading:
    """Return a reading with the strides that projections give."""
    q, k, v, _ = drawn(*shape, dtype)
    hidden = torch.randn(shape[0], shape[2], shape[1] * shape[3], device="cuda", dtype=dtype)
    return Reading(q, k, v, causal=causal, known_bound=1.0, hidden=hidden, stream=hidden, output=q)


def check() -> None:
    """Print the largest errors of the figures of small odd shapes, those of pairs of heads among them."""
    for shape, dtype, causal in (
        ((2, 5, 333, 64), torch.bfloat16, True),
        ((1, 3, 257, 80), torch.float16, False),
        ((1, 4, 200, 128), torch.float32, True),
    ):
        given, before = (made(shape, causal, dtype) for _ in range(2))
        needs = set(FIGURES) - {"on_text"}
        for rows in (None, 40):
            queries = Queries.of(given, rows, torch.Generator().manual_seed(0))
            found = by_kernels(given, queries, needs, before)
            exact = [
                Reading(*(x.double() for x in (r.q, r.k, r.v)), causal=causal, known_bound=float("inf"))
                for r in (given, before)
            ]
            right = RowFigures(exact[0], needs, queries, exact[1])
            errors = {name: difference(found[name][:, :, 1:], getattr(right, name)[:, :, 1:]) for name in sorted(needs)}
            told = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
            print(f"errors, {shape}, {dtype}, causal={causal}, rows={rows}: {told}", flush=True)
    x = torch.randn(4, 300, 200, device="cuda")
    squares = torch.linalg.matrix_norm(x.double(), 2).square()
    print(f"errors, largest eigenvalue by squaring: {difference(largest_square(x), squares):.0e}")


def parts(shape: tuple[int, int, int, int]) -> None:
    """Print the times of the parts of a reading over that of a fused forward."""
    given, before = made(shape, True), made(shape, True)
    queries, sample = Queries.of(given), Queries.of(given, 256)
    rows = {"top", "entropy", "peak", "distance", "centred"}
    forward = both(lambda: F.scaled_dot_product_attention(given.q, given.k, given.v, is_causal=True))[0]
    print(f"\n{shape}, causal: fused forward {forward:.3f} ms; over it: device, host")
    x = torch.randn(shape[0], min(shape[2], 2048), 768, device="cuda")
    runs: dict[str, Callable[[], object]] = {
        "rows without values": lambda: by_kernels(given, queries, rows),
        "rows with values": lambda: by_kernels(given, queries, rows | {"roughness"}),
        "and the symmetric kernel": lambda: by_kernels(given, queries, rows | {"roughness", "descent"}),
        "log-sum-exps and columns": lambda: by_kernels(given, queries, {"columns"}),
        "pairs of heads": lambda: by_kernels(given, queries, {"likeness"}),
        "pairs with the layer before": lambda: by_kernels(given, queries, {"likeness", "crossing"}, before),
        "pairs, 256 queries": lambda: by_kernels(given, sample, {"likeness", "crossing"}, before),
        "largest eigenvalue of tokens": lambda: largest_square(x),
        "full reading (6)": lambda: read(given, previous=before),
        "reading of 256 queries (4)": lambda: read(given, rows=256, previous=before),
    }
    for name, run in runs.items():
        device, host = both(run)
        print(f"  {name:32} {device / forward:7.2f} {host / forward:7.2f}   ({host:.3f} ms)", flush=True)


def solvers() -> None:
    """Print the milliseconds of the solvers of a whole model's weights: 12 layers, 12 heads, both products."""
    for name, matrices in (
        ("GPU", torch.randn(288, 64, 64, device="cuda", dtype=torch.float64)),
        ("CPU", torch.randn(288, 64, 64, dtype=torch.float64)),
    ):
        runs: dict[str, Callable[[Tensor], object]] = {
            "eigh": lambda x: torch.linalg.eigh(x @ x.mT),
            "singular values": by_eigenvalues,
        }
        for what, run in runs.items():
            run(matrices)
            torch.cuda.synchronize()
            began = time.perf_counter()
            run(matrices)
            torch.cuda.synchronize()
            print(f"{what} of 288 matrices, 64 x 64, fp64, {name}: {(time.perf_counter() - began) * 1e3:.1f} ms")


def steps() -> None:
    """Print the milliseconds of training steps of two layers, plain and with a reading in every step."""
    for model, training in MODELS.items():
        batch = [
            x.cuda().to(torch.bfloat16 if x.is_floating_point() else x.dtype) for x in training.batch(training.size)
        ]
        for watched in (False, True):
            torch.manual_seed(0)
            net = training.layers(2)
            watch: Any = headwise.watch(net, every=1, on_alert=None) if watched else None
            net.cuda().to(torch.bfloat16)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
            times = []
            for _ in range(6):
                torch.cuda.synchronize()
                began = time.perf_counter()
                net(*batch).backward()
                queued = time.perf_counter()
                optimizer.step()
                optimizer.zero_grad()
                torch.cuda.synchronize()
                stepped = time.perf_counter()
                if watch is not None:
                    watch.step()
                torch.cuda.synchronize()
                times.append([x - began for x in (queued, stepped, time.perf_counter())])
            queued, stepped, done = (sorted(x)[1] * 1e3 for x in zip(*times[1:], strict=True))
            what = "watch(every=1)" if watched else "plain"
            first = times[0][2] * 1e3
            print(
                f"{model}, {what}: host until queued {queued:.2f} ms, with the optimizer's step {stepped:.2f}, "
                f"with watch.step() {done:.2f}; first step {first:.0f}",
                flush=True,
            )


def main() -> None:
    """Check and time all parts."""
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    check()
    for shape in SHAPES:
        parts(shape)
    solvers()
    steps()


if __name__ == "__main__":
    main()
