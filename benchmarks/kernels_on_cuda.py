"""Each attention kernel on a GPU: checked against the textbook in fp64, then timed against fused attention, in bf16.

python benchmarks/kernels_on_cuda.py              # all parts, about a minute; the lines that matter most come first
python benchmarks/kernels_on_cuda.py --only rows  # the keys' gradient with other tiles: errors and times, seconds
python benchmarks/kernels_on_cuda.py --only tune  # other tiles of each kernel, at 16,384 tokens

A time is given as three: of the device when nothing keeps it waiting, of the host for the calls alone, and of both
together without a synchronisation after each run. The largest of the first two is what bounds a training step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attend.attention import triton_largest, triton_rows
from headwise.attend.attention.flash_rows import attend_with_lse
from headwise.attend.attention.largest_logits import largest_logits
from headwise.attend.attention.row_statistics import attend_rows
from headwise.health.statistics import Queries, Reading, RowFigures, read, triton_figures
from headwise.health.statistics.figures_by_kernels import FIGURES, by_kernels

SHAPES = ((8, 12, 1024, 64), (1, 12, 16384, 64))
CHECKED = ((2, 3, 333, 64, torch.bfloat16), (1, 2, 257, 80, torch.float16), (1, 2, 200, 128, torch.float32))
# Blocks of queries and of keys, warps, stages of the kernel of keys in half precision; the first is the set one.
KEYS_TILES = ((32, 128, 8, 2), (64, 128, 8, 2), (32, 64, 4, 2), (32, 128, 8, 3), (32, 128, 8, 1))
TILES = (
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3),
    (128, 128, 8, 2), (128, 128, 8, 3), (64, 32, 4, 3),
)  # fmt: skip


@dataclass
class Took:
    """Milliseconds of one run: of the device alone, of the host alone, and of both together."""

    device: float
    host: float
    wall: float

    def over(self, plain: Took) -> str:
        """Return the ratios to another run."""
        ratios = (getattr(self, name) / getattr(plain, name) for name in ("device", "host", "wall"))
        bound = "host" if self.host > self.device else "device"
        return " ".join(f"{ratio:8.2f}" for ratio in ratios) + f"  {self.device:9.3f} ms, bound by the {bound}"

    def __str__(self) -> str:
        return f"device {self.device:.3f} ms, host {self.host:.3f} ms, both {self.wall:.3f} ms"


Clock = Callable[[Callable[[], object]], Took]


def measured(run: Callable[[], object], seconds: float = 0.1) -> Took:
    """Return what a run takes, each number a mean over as many runs as fit into `seconds`."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    # No more than a queue of launches holds, so that the host never waits for the device.
    runs = max(3, min(30, int(seconds / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(runs):
        run()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device sleeps until all runs are queued (some 2 GHz), and then does them without a gap.
    torch.cuda._sleep(int(2.5e9 * host))
    first.record()
    for _ in range(runs):
        run()
    last.record()
    torch.cuda.synchronize()
    return Took(first.elapsed_time(last) / runs, 1e3 * host / runs, 1e3 * wall / runs)


def once(run: Callable[[], object]) -> Took:
    """Run once, which compiles."""
    run()
    return Took(1.0, 1.0, 1.0)


def drawn(batch: int, heads: int, tokens: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return q, k, v and a gradient with the strides that projections give them."""
    return [torch.randn(batch, tokens, heads, size, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4)]


def difference(found: Tensor, right: Tensor) -> float:
    """Return the largest difference over the largest number."""
    found, right = found.detach().double(), right.detach().double()
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-6))


def textbook(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
    """Return the logits in fp64, q, k and v in fp64, and the output and three statistics of each row."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    s = wide[0] @ wide[1].mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], device=q.device, dtype=torch.bool).triu(1), float("-inf"))
    lse, a = s.logsumexp(-1), s.softmax(-1)
    entropy = -(a * (s - lse[..., None]).masked_fill(s == float("-inf"), 0.0)).sum(-1)
    return s, wide, (a @ wide[2], lse, entropy, a.square().sum(-1))


def errors_of_rows(given: list[Tensor], causal: bool) -> tuple[dict[str, float], Tensor]:
    """Return the errors of the row statistics and their gradients, and the logits in fp64."""
    q, k, v, g = given
    s, wide, right = textbook(q, k, v, causal)
    weights = (g.double(), *(torch.rand_like(right[1]) for _ in range(3)))
    wanted = torch.autograd.grad(sum((x * w).sum() for x, w in zip(right, weights, strict=True)), wide)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = attend_rows(*leaves, None, causal, q.shape[-1] ** -0.5)
    made = torch.autograd.grad(sum((x.double() * w).sum() for x, w in zip(found, weights, strict=True)), leaves)
    names = ("out", "lse", "entropy", "squares", "dq", "dk", "dv")
    pairs = zip(names, (*found, *made), (*right, *wanted), strict=True)
    return {name: difference(x, y) for name, x, y in pairs}, s


def errors_of_lse(given: list[Tensor], causal: bool) -> dict[str, float]:
    """Return the errors of fused attention with its log-sum-exp, and of their gradients, with some dO of zeros."""
    q, k, v, g = given
    g = g.clone()
    g[:, :, 5:9] = 0.0
    _, wide, right = textbook(q, k, v, causal)
    weights = (g.double(), torch.rand_like(right[1]))
    wanted = torch.autograd.grad(right[:2], wide, weights)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = attend_with_lse(*leaves, None, causal, q.shape[-1] ** -0.5)
    made = torch.autograd.grad(found, leaves, (g, weights[1].to(found[1].dtype)))
    pairs = zip(("out", "lse", "dq", "dk", "dv"), (*found, *made), (*right[:2], *wanted), strict=True)
    return {f"flash {name}": difference(x, y) for name, x, y in pairs}


def check(case: tuple[int, int, int, int, torch.dtype], causal: bool, clock: Clock) -> None:
    """Print the largest error of each kernel on a small odd shape."""
    given = drawn(*case)
    errors, s = errors_of_rows(given, causal)
    errors |= errors_of_lse(given, causal)
    q, k, v, _ = given
    errors["largest"] = difference(largest_logits(q, k, None, causal, q.shape[-1] ** -0.5), s.amax((-1, -2)))
    reading = Reading(q, k, v, causal=causal, known_bound=1.0)
    queries, needs = Queries.of(reading), set(FIGURES) - {"on_text"}
    exact = Reading(q.double(), k.double(), v.double(), causal=causal, known_bound=float("inf"))
    figures, pytorch = by_kernels(reading, queries, needs), RowFigures(exact, needs, queries)
    for name in sorted(needs):
        one, other = (x[:, :, 1:] if name == "descent" else x for x in (figures[name], getattr(pytorch, name)))
        errors[name] = difference(one, other)
    told = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    print(f"errors, {case[:4]}, {case[4]}, causal={causal}: {told}", flush=True)


def tiles_of_keys(tiles: tuple[int, int, int, int], clock: Clock) -> None:
    """Print the errors of gradients in bf16, and the time of a penalty's step, with these tiles of `keys_kernel`."""
    original = triton_rows.settings

    def chosen(kernel, *given):
        found = original(kernel, *given)
        names = ("BT", "BN", "num_warps", "num_stages")
        return found | dict(zip(names, tiles, strict=True)) if kernel == "keys" else found

    with patch.object(triton_rows, "settings", chosen):
        told = []
        for causal in (True, False):
            errors, _ = errors_of_rows(drawn(*CHECKED[0]), causal)
            told.append(", ".join(f"{name} {errors[name]:.0e}" for name in ("dk", "dv", "dq")))
        for shape in SHAPES:
            q, k, v, g = drawn(*shape)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            took = clock(partial(attend, *leaves, g, True, 2))
            told.append(f"{shape[2]} tokens: {took.device:.3f} ms")
    print(f"keys, tiles {tiles}: causal {told[0]}; not causal {told[1]}; {told[2]}, {told[3]}", flush=True)


def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool, figures: int) -> None:
    """Run attention with the first of output, log-sum-exp, entropy and squares in the loss, and its backward."""
    outputs = attend_rows(q, k, v, None, causal, q.shape[-1] ** -0.5)
    gradients = [g, *(torch.ones_like(x) for x in outputs[1 : figures + 1])]
    torch.autograd.grad(outputs[: figures + 1], (q, k, v), gradients)


def attend_lse(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool) -> None:
    """Run fused attention with its log-sum-exp in the loss, and its backward."""
    outputs = attend_with_lse(q, k, v, None, causal, q.shape[-1] ** -0.5)
    torch.autograd.grad(outputs, (q, k, v), (g, torch.ones_like(outputs[1])))


def fused_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool) -> None:
    """Run fused attention and its backward."""
    torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), g)


def penalties(shape: tuple[int, int, int, int], causal: bool, clock: Clock) -> None:
    """Print the time of attention with statistics in the loss, over fused forward and backward."""
    q, k, v, g = drawn(*shape)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    plain = clock(partial(fused_step, *leaves, g, causal))
    print(f"\n{shape}, causal={causal}: fused forward and backward, {plain}; over it (1.4):", flush=True)
    print(f"  {'':32}   device     host     both", flush=True)
    print(f"  {'log-sum-exp of flash':32} {clock(partial(attend_lse, *leaves, g, causal)).over(plain)}", flush=True)
    for figures, name in ((1, "log-sum-exp"), (2, "and entropy"), (3, "and squares")):
        print(f"  {name:32} {clock(partial(attend, *leaves, g, causal, figures)).over(plain)}", flush=True)


def readings(shape: tuple[int, int, int, int], causal: bool, clock: Clock) -> None:
    """Print the time of the largest logit and of readings, over the fused forward."""
    q, k, v, _ = drawn(*shape)
    scale = shape[-1] ** -0.5
    plain = clock(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    given = Reading(q, k, v, causal=causal, known_bound=1.0)
    queries = Queries.of(given)
    rows = {"top", "entropy", "peak", "distance", "centred"}
    runs = {
        "largest logit (0.5)": lambda: largest_logits(q, k, None, causal, scale),
        "largest logit, out of reach": lambda: largest_logits(q, k, None, causal, scale, enough=1e9),
        "rows without values": lambda: by_kernels(given, queries, rows),
        "rows with values": lambda: by_kernels(given, queries, rows | {"roughness"}),
        "all rows and columns": lambda: by_kernels(given, queries, set(FIGURES) - {"on_text"}),
        "columns alone": lambda: by_kernels(given, queries, {"columns"}),
        "reading of 256 queries": lambda: read(given, rows=256),
        "full reading (6)": lambda: read(given),
    }
    print(f"\n{shape}, causal={causal}: fused forward, {plain}; over it:", flush=True)
    print(f"  {'':32}   device     host     both", flush=True)
    for name, run in runs.items():
        print(f"  {name:32} {clock(run).over(plain)}", flush=True)


def tune(name: str, clock: Clock) -> None:
    """Print the time of a kernel with other block sizes."""
    q, k, v, g = drawn(*SHAPES[-1])
    given = Reading(q, k, v, causal=True, known_bound=1.0)
    queries = Queries.of(given)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    module, run = {
        "largest": (triton_largest, lambda: largest_logits(q, k, None, True, 0.125)),
        "figures": (
            triton_figures,
            lambda: by_kernels(given, queries, {"entropy", "distance", "centred", "roughness"}),
        ),
        "columns": (triton_figures, lambda: by_kernels(given, queries, {"columns"})),
        "row statistics": (triton_rows, lambda: attend(*leaves, g, True, 2)),
    }[name]
    original = module.settings
    for tiles in TILES:

        def chosen(*given, tiles=tiles, **more):
            return original(*given, **more) | dict(zip(("BT", "BN", "num_warps", "num_stages"), tiles, strict=True))

        with patch.object(module, "settings", chosen):
            try:
                print(f"{name:16} {tiles} {clock(run)}", flush=True)
            except Exception as error:
                print(f"{name:16} {tiles} {type(error).__name__}", flush=True)


# Each job compiles what the others do not.
PARTS: dict[str, list[Callable[[Clock], None]]] = {
    "rows": [partial(tiles_of_keys, tiles) for tiles in KEYS_TILES],
    "penalties": [partial(penalties, shape, True) for shape in SHAPES],
    "errors": [partial(check, case, causal) for causal in (True, False) for case in CHECKED],
    "readings": [partial(readings, shape, True) for shape in SHAPES],
    "tune": [partial(tune, name) for name in ("largest", "figures", "columns", "row statistics")],
}


def compile_apart(parts: list[str]) -> None:
    """Run all jobs in processes side by side, which fills Triton's cache; the runs that count then compile nothing."""
    commands = [
        [sys.executable, __file__, "--only", part, "--job", str(job)]
        for part in parts
        for job in range(len(PARTS[part]))
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for process in [subprocess.Popen(command, **quiet) for command in commands]:
        # What fails there fails here again, where it is seen.
        process.wait()


def main() -> None:
    """Compile, check and time the kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = [options.only] if options.only else [part for part in PARTS if part != "tune"]
    torch.manual_seed(0)
    if options.job is not None:
        PARTS[options.only][options.job](once)
        return
    start = time.perf_counter()
    compile_apart(parts)
    took = time.perf_counter() - start
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled in {took:.0f} s", flush=True)
    for part in parts:
        for job in PARTS[part]:
            job(measured)


if __name__ == "__main__":
    main()
