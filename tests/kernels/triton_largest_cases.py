"""Runs the Triton kernels of the largest logit: interpreted beside the textbook, or compiled for GPUs not at hand.

TRITON_INTERPRET=1 python tests/kernels/triton_largest_cases.py run    prints for each case its largest error
python tests/kernels/triton_largest_cases.py compile                   prints for each launch what it needs
"""

import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.attend.attention import triton_largest

CASES = {
    # name: (batch, heads, groups, queries, keys, size, mask, causal, dtype)
    "plain, odd": (2, 3, 1, 37, 41, 16, "none", False, "float32"),
    "causal": (1, 2, 1, 131, 131, 64, "none", True, "float32"),
    "causal, fewer queries than keys": (1, 1, 1, 5, 140, 16, "none", True, "float32"),
    "causal, more queries than keys": (1, 1, 1, 140, 5, 16, "none", True, "float32"),
    "more than one chunk of keys": (1, 1, 1, 33, 1100, 16, "none", False, "float32"),
    "grouped, a head size that is no power of two": (2, 6, 3, 67, 67, 80, "none", True, "float32"),
    "head size 256": (1, 1, 1, 40, 40, 256, "none", True, "float32"),
    "a mask by entry": (2, 2, 1, 70, 75, 32, "entries", False, "float32"),
    "padding": (2, 2, 1, 70, 70, 32, "padding", True, "float32"),
    "rows without keys": (1, 2, 1, 40, 40, 32, "empty", False, "float32"),
    "nothing is allowed": (1, 2, 1, 20, 20, 32, "nothing", False, "float32"),
    "bf16": (1, 2, 1, 150, 150, 64, "none", True, "bfloat16"),
    "fp16, padding": (1, 4, 2, 70, 70, 40, "padding", False, "float16"),
}


def inputs(batch, heads, groups, queries, keys, size, mask, causal, dtype):
    """Return tensors whose strides are not those of a fresh tensor, with nan in padding."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(batch, queries, heads, size, generator=g).transpose(1, 2).to(getattr(torch, dtype))
    k = torch.randn(batch, keys, heads // groups, size, generator=g).transpose(1, 2).to(getattr(torch, dtype))
    # all products are negative, as zeros outside of a tensor would then be the largest
    q, k = -q.abs(), k.abs()
    given = real = None
    if mask == "entries":
        given = torch.rand(batch, 1, queries, keys, generator=g) > 0.6
    if mask == "empty":
        given = torch.rand(1, heads, queries, keys, generator=g) > 0.95
    if mask == "nothing":
        given = torch.zeros(1, 1, 1, keys, dtype=torch.bool)
    if mask == "padding":
        real = torch.arange(queries) < torch.tensor([[queries - 3], [queries - 30]])[:batch]
        given = real[:, None, None]
        # a padded query that would have the largest logit
        q[:, :, -1] = k[:, :1, 0]
        k[:, :, -1] = float("nan")
    return q, k, given, causal, size**-0.5, real


def textbook(q, k, mask, causal, scale, real):
    s = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    seen = torch.ones(s.shape, dtype=torch.bool) if mask is None else mask.expand(s.shape)
    seen = seen.tril() if causal else seen
    seen = seen if real is None else seen & real[:, None, :, None]
    return s.masked_fill(~seen, float("-inf")).amax((-1, -2))


def run(name):
    """Return the largest errors, without a bound and with bounds that some heads reach."""
    given = inputs(*CASES[name])
    want = textbook(*given)
    found = triton_largest.largest(*given, float("-inf"))
    error = torch.where(found == want, 0.0, (found - want).abs() / want.abs()).max().item()
    # a bound that the norms of no head reach, and one that all pass
    below = triton_largest.largest(*given, 1e4)
    above = triton_largest.largest(*given, -1e4)
    return {
        "error": error,
        "skipped": bool(((below >= want) & (below <= 1e4)).all()) and bool((below > want).any() or want.isinf().all()),
        "read": torch.equal(above, found),
    }


def compile_all():
    for capability in (80, 90, 100):
        with compiled_instead_of_launched(capability) as made:
            cases = []
            for dtype, size, mask in (
                ("bfloat16", 64, "none"),
                ("bfloat16", 128, "none"),
                ("bfloat16", 256, "none"),
                ("float16", 80, "padding"),
                ("float32", 64, "entries"),
                ("float32", 256, "none"),
            ):
                given = inputs(2, 4, 1, 512, 512, size, mask, True, dtype)
                triton_largest.largest(*given, 100.0)
                cases += [f"{dtype} {size} {mask}"] * (len(made) - len(cases))
        for case, line in zip(cases, made, strict=True):
            print(json.dumps({"capability": capability, "case": case, **line}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        for case in sys.argv[2:] or CASES:
            print(json.dumps({"case": case, **run(case)}), flush=True)
