"""Runs the Triton kernels that mix weights over heads: interpreted beside the matrix in fp64, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_mixing_cases.py run     prints for each case its largest errors
TRITON_INTERPRET=1 python tests/kernels/triton_mixing_cases.py method  prints ReAttention's, beside its matrix form
TRITON_INTERPRET=1 python tests/kernels/triton_mixing_cases.py graph   prints whether a compiled graph gives the same
python tests/kernels/triton_mixing_cases.py compile                    prints for each launch what it needs
"""

import json
import sys

import torch
from triton_cases import inputs
from triton_process import compiled_instead_of_launched

from headwise.attend.attention import head_mixing, strips, triton_mixing
from headwise.numerics import kernels
from headwise.numerics.masked import MASKED, allowed_keys, masked_logits

EPS = 1e-5
CASES = {
    # name: (batch, heads, groups, queries, keys, size, size of values, mask, causal, dtype, norm, rows that count,
    #        sinks, strips)
    "no norm": (2, 3, 1, 37, 37, 32, 32, "none", False, "float32", "none", False, False, False),
    "no norm, causal": (1, 2, 1, 70, 70, 32, 32, "none", True, "float32", "none", False, False, False),
    "no norm, rows of the lowest number": (
        1,
        2,
        1,
        20,
        20,
        32,
        32,
        "lowest",
        False,
        "float32",
        "none",
        False,
        False,
        False,
    ),
    "batch": (2, 3, 1, 37, 41, 32, 24, "none", False, "float32", "batch", False, False, False),
    "batch, causal": (2, 2, 1, 70, 70, 32, 32, "none", True, "float32", "batch", False, False, False),
    "batch, causal, in strips": (2, 2, 1, 150, 150, 16, 16, "none", True, "float32", "batch", False, False, True),
    "batch, in strips": (1, 2, 1, 140, 150, 16, 16, "none", False, "float32", "batch", True, False, True),
    "one sample after the other": (2, 2, 1, 40, 40, 16, 16, "bool", True, "float32", "batch", True, False, 16000),
    "kept figures": (2, 3, 1, 37, 37, 32, 32, "none", True, "float32", "kept", False, False, False),
    "causal, fewer queries than keys": (1, 2, 1, 5, 40, 16, 16, "none", True, "float32", "batch", False, False, False),
    "causal, more queries than keys": (1, 2, 1, 70, 5, 16, 16, "none", True, "float32", "batch", False, False, False),
    "boolean mask": (2, 2, 1, 20, 33, 32, 32, "bool", False, "float32", "batch", True, False, False),
    "a row without any key": (1, 2, 1, 20, 20, 32, 32, "empty", False, "float32", "batch", False, False, False),
    "padding, causal, some queries": (2, 2, 1, 70, 70, 32, 32, "padding", True, "float32", "batch", True, False, False),
    "a mask of each head": (1, 3, 1, 40, 40, 32, 32, "additive", False, "float32", "batch", True, False, False),
    "rows of the lowest number": (1, 2, 1, 20, 20, 32, 32, "lowest", False, "float32", "batch", True, False, False),
    "packed rows": (4, 2, 1, 33, 33, 32, 32, "sequences", True, "float32", "batch", True, False, False),
    "grouped heads": (2, 6, 3, 40, 40, 24, 24, "none", True, "float32", "batch", False, False, False),
    "seventeen heads, sinks": (1, 17, 1, 20, 20, 16, 16, "padding", True, "float32", "batch", True, True, False),
    "fp16": (1, 3, 1, 140, 140, 64, 64, "padding", True, "float16", "batch", False, False, False),
    "bf16": (1, 4, 2, 140, 140, 64, 64, "none", True, "bfloat16", "batch", True, False, False),
    "bf16, no norm": (2, 4, 1, 70, 90, 80, 80, "none", False, "bfloat16", "none", False, False, False),
    "fp16, head size 256": (1, 2, 1, 70, 70, 256, 256, "none", False, "float16", "batch", False, False, False),
}


def given_to(batch, heads, groups, queries, keys, size, size_v, mask, causal, dtype, norm, some, sinks):
    """Return q, k, v, mask, the mask of all heads, which queries count, sinks, causality, scale and what is learned."""
    q, k, v, given, causal, scale = inputs(batch, heads, groups, queries, keys, size, size_v, mask, causal, dtype)
    # Of some size, so that weights differ.
    q = q * 2
    if mask == "additive":
        # Keys that only some heads forbid, and keys that all do.
        given[:, 1:, :, 5] = float("-inf")
        given[..., 7] = float("-inf")
    real = torch.arange(queries) < torch.tensor([[queries - 3], [queries // 2]])[:batch] if some else None
    if batch > 2 and some:
        real = torch.arange(queries) < torch.tensor([[queries], [5], [1], [20]])[:batch]
    g = torch.Generator().manual_seed(5)
    mix = torch.eye(heads) + 0.3 * torch.randn(heads, heads, generator=g)
    gain, shift = (0.5 + torch.rand(heads, generator=g), 0.1 * torch.randn(heads, generator=g))
    fixed = torch.stack([0.1 * torch.randn(heads, generator=g), 0.01 + torch.rand(heads, generator=g)])
    seen = None
    if given is not None and norm != "none":
        four = given[(None,) * (4 - given.dim())]
        seen = four if four.shape[1] == 1 else (four > MASKED).any(1, keepdim=True)
    learned = [mix] if norm == "none" else [mix, gain, shift]
    fixed = fixed if norm == "kept" else None
    return q, k, v, given, seen, real, torch.linspace(-1, 2, heads) if sinks else None, causal, scale, learned, fixed


def textbook(q, k, v, mask, real, sinks, causal, scale, learned, fixed):
    """Return the output, written out, the log-sum-exp of rows, the number of entries that count, and their figures."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    known = mask if mask is not None and mask.dtype == torch.bool else None
    s = masked_logits(q @ k.mT * scale, mask, allowed_keys(known, causal, slice(0, q.shape[2]), k.shape[2], q.device))
    empty = (s == float("-inf")).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    column = [] if sinks is None else [sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)]
    a = torch.cat([s, *column], -1).softmax(-1)[..., : s.shape[-1]].masked_fill(empty, 0.0)
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], 0.0)
    mixed = torch.einsum("hg,bgtn->bhtn", learned[0], a)
    if len(learned) == 1:
        return mixed @ v, lse, None, None
    seen = torch.ones_like(s[:, :1], dtype=torch.bool)
    allowed = allowed_keys(mask, causal, slice(0, q.shape[2]), k.shape[2], q.device)
    if allowed is not None:
        seen = seen & allowed.any(1, keepdim=True)
    counted = (seen if real is None else seen & real[:, None, :, None]).expand(q.shape[0], 1, -1, -1)
    if fixed is None:
        of_head = [mixed[:, h][counted[:, 0]] for h in range(q.shape[1])]
        fixed = torch.stack(
            [torch.stack([x.mean() for x in of_head]), torch.stack([x.var(correction=0) for x in of_head])]
        )
    mean, variance = fixed[:, :, None, None]
    normed = (mixed - mean) / (variance + EPS).sqrt() * learned[1][:, None, None] + learned[2][:, None, None]
    return normed.masked_fill(~seen, 0.0) @ v, lse, counted.sum(), fixed


def run(name):
    """Return the largest error of the output, the figures and each gradient, over the largest number wanted."""
    *case, small = CASES[name]
    q, k, v, mask, seen, real, sinks, causal, scale, learned, fixed = given_to(*case)
    strips.STRIP = int(small) if small else 128 << 20
    leaves = [x for x in (q, k, v, sinks, *learned) if x is not None]
    wide = [x.double().requires_grad_() for x in leaves]
    first = 3 if sinks is None else 4
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    wanted, lse, count, batch = textbook(
        *wide[:3], wide_mask, real, None if sinks is None else wide[3], causal, scale, wide[first:],
        None if fixed is None else fixed.double(),
    )  # fmt: skip
    for x in leaves:
        x.requires_grad_()
    norm = (None, None) if len(learned) == 1 else learned[1:]
    given = (
        q, k, v, lse.float().detach(), mask, seen, real if fixed is None else None, sinks, causal, scale, learned[0],
        *norm, fixed, None, count if fixed is None else None, EPS,
    )  # fmt: skip
    found, _, _, table = head_mixing._MixedHeads.apply(*given)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9))
    right = torch.autograd.grad(wanted, wide, g.double())
    made = torch.autograd.grad(found, leaves, g.to(found.dtype))
    assert all(a.dtype == b.dtype for a, b in zip(made, leaves, strict=True))
    pairs = [(found, wanted), *zip(made, right, strict=True)]
    if batch is not None:
        pairs += [(table[:2], batch)]
    return [((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs]


def method():
    """Print whether ReAttention runs on the kernels in each kind of call, and its difference from the matrix."""
    from headwise.attend.methods.text import parse
    from headwise.testing.calls import KINDS, run, why_not

    kernels.operators_run_on = lambda device: True
    launched = []
    original = triton_mixing.forward
    triton_mixing.forward = lambda *given: launched.append(given) or original(*given)
    for text in ("ReAttention()", "ReAttention(norm='none')"):
        made = parse(text)
        for kind in sys.argv[2:] or KINDS:
            if any(why_not(method, kind) for method in made):
                continue
            launched.clear()
            fast = run(made, kind, "fast")
            ran = len(launched)
            whole = run(made, kind, "textbook")
            pairs = [(fast.out, whole.out), *((fast.grads[n], g) for n, g in whole.grads.items() if g is not None)]
            error = max(((a - b).norm() / (b.norm() + 2e-2)).item() for a, b in pairs)
            told = "mixed heads" in fast.kernels
            print(json.dumps({"method": text, "kind": kind, "error": error, "launched": ran, "told": told}), flush=True)


def graph():
    """Print whether a compiled graph gives the same gradients as an eager call."""
    q, k, v, mask, seen, real, sinks, causal, scale, learned, _ = given_to(*CASES["seventeen heads, sinks"][:-1])
    lse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(1))
    leaves = [x.requires_grad_() for x in (q, k, v, sinks, *learned)]

    def whole(q, k, v, sinks, *learned):
        given = (q, k, v, lse, mask, seen, real, sinks, causal, scale, *learned, None, None, torch.tensor(300.0), EPS)
        run = head_mixing._operator if torch.compiler.is_compiling() else head_mixing._MixedHeads.apply
        return run(*given)[0].square().sum()

    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    eager, found = (torch.autograd.grad(call(*leaves), leaves) for call in (whole, compiled))
    print(json.dumps({"same": all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))}))


def compile_all():
    """Compile what mixing and its gradients launch."""
    kinds = (
        (12, 64, "none", True, "bfloat16", "batch"),
        (12, 64, "none", False, "bfloat16", "batch"),
        (16, 128, "padding", True, "bfloat16", "batch"),
        (12, 64, "additive", False, "float16", "none"),
        (32, 256, "none", True, "bfloat16", "batch"),
        (12, 64, "bool", False, "float32", "batch"),
        (64, 64, "none", True, "bfloat16", "batch"),
    )
    for capability in map(int, sys.argv[2:] or (80, 90, 100)):
        for heads, size, mask, causal, dtype, norm in kinds:
            some = norm == "batch" and mask != "none"
            q, k, v, given, seen, real, sinks, causal, scale, learned, _ = given_to(
                2, heads, 1, 512, 512, size, size, mask, causal, dtype, norm, some, False
            )
            norms = (None, None) if norm == "none" else learned[1:]
            with compiled_instead_of_launched(capability) as made:
                for x in (q, k, v):
                    x.requires_grad_()
                lse, count = torch.zeros(q.shape[:3]), torch.tensor(9.0)
                out = head_mixing._MixedHeads.apply(
                    q, k, v, lse, given, seen, real, sinks, causal, scale, learned[0], *norms, None,
                    None, count if norm == "batch" else None, EPS,
                )[0]  # fmt: skip
                torch.autograd.grad(out.sum(), [q, k, v])
            for line in made:
                print(
                    json.dumps({"capability": capability, "case": f"{dtype} {heads} {size} {mask}", **line}), flush=True
                )


if __name__ == "__main__":
    if sys.argv[1] == "run":
        for case in sys.argv[2:] or CASES:
            print(json.dumps({"case": case, "errors": run(case)}), flush=True)
    elif sys.argv[1] in ("method", "graph"):
        {"method": method, "graph": graph}[sys.argv[1]]()
    else:
        compile_all()
