"""Each attention kernel on a GPU: checked against the textbook in fp64, then timed against fused attention, in bf16.

python benchmarks/kernels_on_cuda.py              # about a minute, most of it compilation; one line for each figure
python benchmarks/kernels_on_cuda.py --tune       # also other block sizes of each kernel, at 16,384 tokens
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention import triton_largest, triton_rows
from headwise.attention.largest_logits import largest_logits
from headwise.attention.row_statistics import attend_rows
from headwise.statistics import Queries, Reading, RowFigures, read, triton_figures
from headwise.statistics.figures_by_kernels import FIGURES, by_kernels

SHAPES = ((8, 12, 1024, 64), (1, 12, 16384, 64))
CHECKED = ((2, 3, 333, 64, torch.bfloat16), (1, 2, 257, 80, torch.float16), (1, 2, 200, 128, torch.float32))


def milliseconds(run: Callable[[], object], seconds: float = 0.4) -> float:
    """Return the median time of a run on the device."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < ends and len(times) < 100):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times)[len(times) // 2]


def drawn(batch: int, heads: int, tokens: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return q, k, v and a gradient with the strides that projections give them."""
    return [torch.randn(batch, tokens, heads, size, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4)]


def difference(found: Tensor, right: Tensor) -> float:
    """Return the largest difference over the largest number."""
    found, right = found.detach().double(), right.detach().double()
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-6))


def check(causal: bool) -> None:
    """Print the largest error of each kernel on small odd shapes."""
    for batch, heads, tokens, size, dtype in CHECKED:
        q, k, v, g = drawn(batch, heads, tokens, size, dtype)
        scale = size**-0.5
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        s = wide[0] @ wide[1].mT * scale
        if causal:
            s = s.masked_fill(torch.ones(tokens, tokens, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
        lse = s.logsumexp(-1)
        a = s.softmax(-1)
        entropy = -(a * (s - lse[..., None]).masked_fill(s == float("-inf"), 0.0)).sum(-1)
        right = (a @ wide[2], lse, entropy, a.square().sum(-1))
        weights = (g.double(), *(torch.rand_like(lse) for _ in range(3)))
        wanted = torch.autograd.grad(sum((x * w).sum() for x, w in zip(right, weights, strict=True)), wide)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        found = attend_rows(*leaves, None, causal, scale)
        made = torch.autograd.grad(sum((x.double() * w).sum() for x, w in zip(found, weights, strict=True)), leaves)
        errors = {
            name: difference(x, y)
            for name, x, y in zip(
                ("out", "lse", "entropy", "squares", "dq", "dk", "dv"), (*found, *made), (*right, *wanted), strict=True
            )
        }
        errors["largest"] = difference(largest_logits(q, k, None, causal, scale), s.amax((-1, -2)))
        given = Reading(q, k, v, causal=causal, known_bound=1.0)
        queries, needs = Queries.of(given), set(FIGURES) - {"on_text"}
        exact = Reading(q.double(), k.double(), v.double(), causal=causal, known_bound=float("inf"))
        figures, pytorch = by_kernels(given, queries, needs), RowFigures(exact, needs, queries)
        for name in sorted(needs):
            one, other = (x[:, :, 1:] if name == "descent" else x for x in (figures[name], getattr(pytorch, name)))
            errors[name] = difference(one, other)
        told = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
        print(f"errors, {(batch, heads, tokens, size)}, {dtype}, causal={causal}: {told}", flush=True)


def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool, figures: int) -> None:
    """Run attention with the first of output, log-sum-exp, entropy and squares in the loss, and its backward."""
    outputs = attend_rows(q, k, v, None, causal, q.shape[-1] ** -0.5)
    gradients = [g, *(torch.ones_like(x) for x in outputs[1 : figures + 1])]
    torch.autograd.backward(outputs[: figures + 1], gradients)


def timings(shape: tuple[int, int, int, int], causal: bool) -> None:
    """Print the time of each kernel over that of fused attention."""
    q, k, v, g = drawn(*shape)
    scale = shape[-1] ** -0.5
    forward = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
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
        "full reading (6)": lambda: read(given),
        "reading of 256 queries": lambda: read(given, rows=256),
    }
    print(f"\n{shape}, causal={causal}: fused forward {forward:.3f} ms", flush=True)
    for name, run in runs.items():
        print(f"  {name:32} {milliseconds(run) / forward:7.2f}", flush=True)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    both = milliseconds(lambda: F.scaled_dot_product_attention(*leaves, is_causal=causal).backward(g))
    print(f"  fused forward and backward {both:.3f} ms; penalties over it (1.4):", flush=True)
    for figures, name in ((1, "log-sum-exp"), (2, "and entropy"), (3, "and squares")):
        print(f"  {name:32} {milliseconds(partial(attend, *leaves, g, causal, figures)) / both:7.2f}", flush=True)


TILES = (
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3),
    (128, 128, 8, 2), (128, 128, 8, 3), (64, 32, 4, 3),
)  # fmt: skip


def tune() -> None:
    """Print the time of each kernel with other block sizes, in ms."""
    shape = SHAPES[-1]
    q, k, v, g = drawn(*shape)
    given = Reading(q, k, v, causal=True, known_bound=1.0)
    queries = Queries.of(given)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    kernels = {
        "largest": (triton_largest, lambda: largest_logits(q, k, None, True, 0.125)),
        "figures": (
            triton_figures,
            lambda: by_kernels(given, queries, {"entropy", "distance", "centred", "roughness"}),
        ),
        "columns": (triton_figures, lambda: by_kernels(given, queries, {"columns"})),
        "row statistics": (triton_rows, lambda: attend(*leaves, g, True, 2)),
    }
    for name, (module, run) in kernels.items():
        original = module.settings
        for bt, bn, warps, stages in TILES:

            def chosen(*given, bt=bt, bn=bn, warps=warps, stages=stages, original=original, **more):
                return original(*given, **more) | {"BT": bt, "BN": bn, "num_warps": warps, "num_stages": stages}

            with patch.object(module, "settings", chosen):
                try:
                    print(f"{name:16} {(bt, bn, warps, stages)} {milliseconds(run, 0.2):.3f} ms", flush=True)
                except Exception as error:
                    print(f"{name:16} {(bt, bn, warps, stages)} {type(error).__name__}", flush=True)


def main() -> None:
    """Check and time all kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for causal in (True, False):
        check(causal)
    for shape in SHAPES:
        for causal in (True, False):
            timings(shape, causal)
    if options.tune:
        tune()


if __name__ == "__main__":
    main()
