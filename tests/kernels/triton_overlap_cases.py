"""Runs the Triton kernels of the overlap of heads: interpreted beside the matrix in fp64, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_overlap_cases.py run     prints for each case its largest errors
TRITON_INTERPRET=1 python tests/kernels/triton_overlap_cases.py method  prints Decorrelation's, beside its matrix form
TRITON_INTERPRET=1 python tests/kernels/triton_overlap_cases.py graph   prints whether a compiled graph gives the same
python tests/kernels/triton_overlap_cases.py compile                    prints for each launch what it needs
"""

import itertools
import json
import sys

import torch
from triton_cases import inputs
from triton_process import compiled_instead_of_launched

from headwise.attend.attention import overlap, strips, triton_overlap
from headwise.numerics import kernels
from headwise.numerics.masked import allowed_keys, masked_logits

CASES = {
    # name: (batch, heads, groups, queries, keys, size, mask, causal, dtype, which queries count, sinks, strips)
    "all keys": (2, 3, 1, 37, 37, 32, "none", False, "float32", False, False, False),
    "causal": (1, 2, 1, 70, 70, 32, "none", True, "float32", False, False, False),
    "causal, in strips": (1, 2, 1, 160, 160, 16, "none", True, "float32", False, False, True),
    "in strips": (1, 2, 1, 140, 290, 16, "none", False, "float32", True, False, True),
    "one sample after the other": (2, 2, 1, 40, 40, 16, "bool", False, "float32", True, False, 16000),
    "causal, fewer queries than keys": (1, 2, 1, 5, 40, 16, "none", True, "float32", False, False, False),
    "causal, more queries than keys": (1, 2, 1, 70, 5, 16, "none", True, "float32", False, False, False),
    "boolean mask": (2, 2, 1, 20, 33, 32, "bool", False, "float32", False, False, False),
    "a row without any key": (1, 2, 1, 20, 20, 32, "empty", False, "float32", False, False, False),
    "padding, causal, some queries": (2, 2, 1, 70, 70, 32, "padding", True, "float32", True, False, False),
    "additive mask": (1, 3, 1, 40, 40, 32, "additive", False, "float32", True, False, False),
    "grouped heads": (2, 4, 2, 40, 40, 24, "none", True, "float32", False, False, False),
    "sinks": (2, 2, 1, 40, 40, 32, "padding", True, "float32", True, True, False),
    "fp16": (1, 3, 1, 140, 140, 64, "padding", True, "float16", False, False, False),
    "bf16": (1, 4, 2, 140, 140, 64, "none", True, "bfloat16", True, False, False),
    "bf16, in strips": (1, 2, 1, 290, 290, 64, "none", True, "bfloat16", False, False, True),
    "fp16, head size 256": (1, 2, 1, 70, 70, 256, "none", False, "float16", False, False, False),
}


def given_to(batch, heads, groups, queries, keys, size, mask, causal, dtype, some, sinks):
    """Return q, k, mask, which queries count, sinks, whether the call is causal, and its scale."""
    q, k, _, given, causal, scale = inputs(batch, heads, groups, queries, keys, size, size, mask, causal, dtype)
    # Of some size, so that weights differ.
    q = q * 2
    real = torch.arange(queries) < torch.tensor([[queries - 3], [queries // 2]])[:batch] if some else None
    return q, k, given, real, torch.linspace(-1, 2, heads) if sinks else None, causal, scale


def textbook(q, k, mask, real, sinks, causal, scale):
    """Return the overlap of pairs of heads, written out, and the log-sum-exp of rows."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    known = mask if mask is not None and mask.dtype == torch.bool else None
    s = masked_logits(q @ k.mT * scale, mask, allowed_keys(known, causal, slice(0, q.shape[2]), k.shape[2], q.device))
    empty = (s == float("-inf")).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    column = [] if sinks is None else [sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)]
    a = torch.cat([s, *column], -1).softmax(-1)[..., : s.shape[-1]].masked_fill(empty, 0.0)
    if real is not None:
        a = a * real[:, None, :, None]
    pairs = itertools.combinations(range(q.shape[1]), 2)
    total = sum((a[:, i].mT @ a[:, j]).square().sum((1, 2)) for i, j in pairs)
    return total, s.logsumexp(-1).masked_fill(empty[..., 0], 0.0)


def run(name):
    """Return the largest error of the overlap and of each gradient, over the largest number wanted."""
    *case, small = CASES[name]
    q, k, mask, real, sinks, *more = given_to(*case)
    strips.STRIP = int(small) if small else 128 << 20
    wide = [None if x is None else x.double().requires_grad_() for x in (q, k, sinks)]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    wanted, lse = textbook(wide[0], wide[1], wide_mask, real, wide[2], *more)
    leaves = [None if x is None else x.requires_grad_() for x in (q, k, sinks)]
    found = overlap.head_overlap(q, k, lse.float(), mask, real, sinks, *more)
    weights = torch.linspace(1, 2, len(q))
    right = torch.autograd.grad(wanted, [x for x in wide if x is not None], weights.double())
    inner = [x for x in leaves if x is not None]
    made = torch.autograd.grad(found, inner, weights, create_graph=True)
    again = made[0].requires_grad
    # Those that can be differentiated again come from the matrix; these are the kernels'.
    found = overlap.head_overlap(q, k, lse.float(), mask, real, sinks, *more)
    made = (*made, *torch.autograd.grad(found, inner, weights))
    with torch.no_grad():
        alone = overlap.head_overlap(q, k, lse.float(), mask, real, sinks, *more)
    assert again and torch.equal(alone, found) and all(a.dtype == b.dtype for a, b in zip(made, inner * 2, strict=True))
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)).item()
        for a, b in zip((found, *made), (wanted, *right, *right), strict=True)
    ]


def method():
    """Print whether Decorrelation runs on the kernels in each kind of call, and its difference from the matrix."""
    from headwise.attend.methods.text import parse
    from headwise.testing.calls import KINDS, run, why_not

    kernels.operators_run_on = lambda device: True
    launched = []
    original = triton_overlap.head_overlap
    triton_overlap.head_overlap = lambda *given: launched.append(given) or original(*given)
    made = parse("Decorrelation(strength=1000.0)")
    for kind in sys.argv[2:] or KINDS:
        if any(why_not(method, kind) for method in made):
            continue
        launched.clear()
        fast = run(made, kind, "fast")
        ran = len(launched)
        whole = run(made, kind, "textbook")
        pairs = [(fast.out, whole.out), *((fast.grads[n], g) for n, g in whole.grads.items() if g is not None)]
        error = max(((a - b).norm() / (b.norm() + 2e-2)).item() for a, b in pairs)
        print(json.dumps({"kind": kind, "error": error, "launched": ran, "again": len(launched)}), flush=True)


def graph():
    """Print whether a compiled graph gives the same gradients as an eager call."""
    q, k, mask, real, sinks, *more = given_to(*CASES["sinks"][:-1])
    lse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(1))
    leaves = [x.requires_grad_() for x in (q, k, sinks)]

    def whole(q, k, sinks):
        return overlap.head_overlap(q, k, lse, mask, real, sinks, *more).sum()

    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    eager, found = (torch.autograd.grad(call(*leaves), leaves) for call in (whole, compiled))
    print(json.dumps({"same": all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))}))


def compile_all():
    """Compile what the overlap and its gradients launch."""
    kinds = (
        (64, "none", True, "bfloat16", False),
        (64, "none", False, "bfloat16", True),
        (128, "none", True, "bfloat16", False),
        (64, "additive", False, "float16", True),
        (256, "none", True, "bfloat16", False),
        (64, "bool", False, "float32", False),
    )
    for capability in map(int, sys.argv[2:] or (80, 90, 100)):
        for size, mask, causal, dtype, some in kinds:
            q, k, *more, causal, scale = given_to(2, 4, 2, 512, 512, size, mask, causal, dtype, some, some)
            with compiled_instead_of_launched(capability) as made:
                triton_overlap.head_overlap(q, k, torch.zeros(q.shape[:3]), *more, causal, scale, True)
                # one sample's weights are too many: in strips of queries
                strips.STRIP = 0
                triton_overlap.head_overlap(q, k, torch.zeros(q.shape[:3]), *more, causal, scale, True)
            strips.STRIP = 128 << 20
            for line in made:
                print(json.dumps({"capability": capability, "case": f"{dtype} {size} {mask}", **line}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        for case in sys.argv[2:] or CASES:
            print(json.dumps({"case": case, "errors": run(case)}), flush=True)
    elif sys.argv[1] in ("method", "graph"):
        {"method": method, "graph": graph}[sys.argv[1]]()
    else:
        compile_all()
