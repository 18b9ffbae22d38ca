"""The kernels that edit logits, on a GPU: checked against the matrix in fp64, then timed against fused attention.

python benchmarks/edits_on_cuda.py             # half a minute, most of it compilation by many processes
python benchmarks/edits_on_cuda.py --only tune # other block sizes of each kernel

A time is given as in `kernels_on_cuda.py`: of the device, of the host, and of both together.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from kernels_on_cuda import Clock, difference, drawn, fused_step, measured, once
from torch import Tensor

from headwise.attend.attention import triton_edited
from headwise.attend.attention.edited_logits import attend_edited

# batch, heads, tokens, head size, dtype
CHECKED = (
    (2, 3, 333, 64, torch.bfloat16), (1, 2, 257, 80, torch.float16), (1, 2, 200, 64, torch.float32),
    (1, 2, 200, 128, torch.bfloat16), (1, 2, 150, 256, torch.bfloat16),
)  # fmt: skip
# Largest errors over the largest number, of products in these dtypes.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 5e-6}
# GPT-2 small, a long text, and ViT-B/16
SHAPES = ((16, 12, 1024, 64), (1, 12, 16384, 64), (128, 12, 197, 64))
TILES = (
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2),
    (64, 128, 8, 2),
)  # fmt: skip


def number(kind: str, batch: int, heads: int, tokens: int) -> Tensor:
    """Return the numbers of an edit: the cap, beta, or the running sums of gates."""
    if kind in ("past", "between"):
        return F.logsigmoid(torch.randn(batch, tokens, heads, device="cuda")).cumsum(1)
    return torch.tensor(0.7 if kind == "cap" else 2.0)


def matrix(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, kind: str, by: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp from the whole matrix."""
    s = q @ k.mT * scale
    if kind == "cap":
        s = by * torch.tanh(s / by)
    elif kind != "stable":
        sums = by.transpose(1, 2)
        between = sums[..., :, None] - sums[..., None, :]
        s = s + (between if kind == "past" else -between.abs())
    if causal:
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return s.softmax(-1) @ v, s.logsumexp(-1)


def results(given: list[Tensor], causal: bool, kind: str, by: Tensor, exact: bool) -> list[Tensor]:
    """Return output, log-sum-exp, and the gradients of a sum of both, by the kernels or from the matrix in fp64."""
    *given, g = (x.double() if exact else x for x in given)
    leaves = [x.detach().requires_grad_() for x in (*given, by.double().cuda() if exact else by)]
    settings = (causal, given[0].shape[-1] ** -0.5, kind, leaves[3] if by.dim() else leaves[3].detach())
    out, lse = matrix(*leaves[:3], *settings) if exact else attend_edited(*leaves[:3], None, *settings)
    loss = (out.double() * g.double()).sum() + lse.double().sin().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves if by.dim() else leaves[:3])]


def check(case: tuple[int, int, int, int, torch.dtype], kind: str, clock: Clock) -> None:
    """Print the largest errors of outputs and gradients on a small odd shape."""
    batch, heads, tokens, size, dtype = case
    given = drawn(batch, heads, tokens, size, dtype)
    if kind == "stable":
        given[1][:, :, tokens // 2 :] = given[1][:, :, : tokens - tokens // 2]
    by = number(kind, batch, heads, tokens)
    found, wanted = (results(given, kind != "between", kind, by, exact) for exact in (False, True))
    errors = [difference(a, b) for a, b in zip(found, wanted, strict=True)]
    verdict = "right" if all(error <= BOUNDS[dtype] for error in errors) else "WRONG"
    told = " ".join(f"{name} {error:.0e}" for name, error in zip(("out", "lse", "dq", "dk", "dv", "c"), errors))
    print(f"{kind}, {case[:4]}, {dtype}: {told}: {verdict}", flush=True)


def step(leaves: list[Tensor], g: Tensor, causal: bool, kind: str, by: Tensor) -> None:
    """Run edited attention forward and backward."""
    out, _ = attend_edited(*leaves, None, causal, leaves[0].shape[-1] ** -0.5, kind, by)
    torch.autograd.grad(out, (*leaves, by) if by.requires_grad else leaves, g)


def timing(shape: tuple[int, int, int, int], causal: bool, kind: str, clock: Clock) -> None:
    """Print the time of the kernels over that of fused attention."""
    q, k, v, g = drawn(*shape)
    by = number(kind, *shape[:3])
    forward = partial(attend_edited, q, k, v, None, causal, shape[-1] ** -0.5, kind, by)
    alone = clock(partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    both = clock(partial(fused_step, *leaves, g, causal))
    learned = by.requires_grad_(by.dim() > 0)
    print(f"{kind:8} {shape}, causal={causal}, over fused attention: device, host, both", flush=True)
    print(f"  forward         {clock(forward).over(alone)}", flush=True)
    print(f"  with backward   {clock(partial(step, leaves, g, causal, kind, learned)).over(both)}", flush=True)


def tune(kind: str, kernel: str, clock: Clock) -> None:
    """Print the time of forward and backward with other blocks of queries and keys, warps and stages of one kernel."""
    chosen, shape = triton_edited.settings, SHAPES[0]
    q, k, v, g = drawn(*shape)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    by = number(kind, *shape[:3])
    for bt, bn, warps, stages in TILES:
        changed = {"BT": bt, "BN": bn, "num_warps": warps, "num_stages": stages}

        def settings(of: str, *given: object, changed: dict[str, int] = changed) -> dict[str, int]:
            return chosen(of, *given) | (changed if of == kernel else {})

        with patch.object(triton_edited, "settings", settings):
            try:
                print(f"{kind} {kernel:8} {(bt, bn, warps, stages)} {clock(partial(step, leaves, g, True, kind, by))}")
            except Exception as error:
                print(f"{kind} {kernel:8} {(bt, bn, warps, stages)} {type(error).__name__}", flush=True)


PARTS = {
    "errors": [
        *(partial(check, case, "cap") for case in CHECKED),
        *(partial(check, case, kind) for case in CHECKED[:3] for kind in ("stable", "past", "between")),
    ],
    "times": [
        *(partial(timing, SHAPES[0], True, kind) for kind in ("cap", "stable", "past")),
        partial(timing, SHAPES[1], True, "cap"),
        *(partial(timing, SHAPES[2], False, kind) for kind in ("cap", "stable", "between")),
    ],
    "tune": [partial(tune, *pair) for pair in itertools.product(("cap", "stable"), ("forward", "queries", "keys"))],
}


def compile_apart(parts: list[str]) -> None:
    """Run all jobs in processes side by side, which fills Triton's cache; the runs that count then compile nothing."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    jobs = [(part, str(job)) for part in parts for job in range(len(PARTS[part]))]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--only", part, "--job", job], **quiet) for part, job in jobs
    ]
    for process in processes:
        # What fails there fails here again, where it is seen.
        process.wait()


def main() -> None:
    """Compile, check and time the kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = [options.only] if options.only else ["errors", "times"]
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
