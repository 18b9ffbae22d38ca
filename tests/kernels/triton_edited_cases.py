"""Runs the Triton kernels that edit logits: interpreted against the textbook, or compiled for GPUs that are not here.

TRITON_INTERPRET=1 python tests/kernels/triton_edited_cases.py run     prints for each case its largest errors
TRITON_INTERPRET=1 python tests/kernels/triton_edited_cases.py parts   prints what tanh and a row's reference are
TRITON_INTERPRET=1 python tests/kernels/triton_edited_cases.py methods  prints what runs, beside the matrix form
TRITON_INTERPRET=1 python tests/kernels/triton_edited_cases.py calls   prints what holds of each way to call them
python tests/kernels/triton_edited_cases.py compile                    prints for each launch what it needs
"""

import itertools
import json
import sys

import torch
import triton
import triton.language as tl
from triton_cases import inputs
from triton_process import compiled_instead_of_launched

from headwise.attend.attention import triton_edited
from headwise.numerics import kernels
from headwise.numerics.kernels import plain
from headwise.numerics.masked import allowed_keys

CASES = {
    # name: kind, number, (batch, heads, groups, queries, keys, size, size of values, mask, causal, dtype)
    "cap": ("cap", 0.7, (2, 2, 1, 37, 41, 32, 32, "none", False, "float32")),
    "cap, causal": ("cap", 0.7, (1, 2, 1, 70, 70, 32, 32, "none", True, "float32")),
    "cap, fewer queries than keys": ("cap", 3.0, (1, 1, 1, 5, 40, 16, 16, "none", True, "float32")),
    "cap, more queries than keys": ("cap", 3.0, (1, 1, 1, 40, 5, 16, 16, "none", True, "float32")),
    "cap, boolean mask": ("cap", 0.7, (2, 2, 1, 20, 33, 32, 32, "bool", False, "float32")),
    "cap, a row without any key": ("cap", 0.7, (1, 2, 1, 20, 20, 32, 32, "empty", False, "float32")),
    "cap, causal, padding, grouped": ("cap", 0.7, (1, 6, 3, 40, 40, 24, 40, "padding", True, "float32")),
    "cap, additive mask": ("cap", 0.7, (1, 2, 1, 20, 20, 32, 32, "additive", False, "float32")),
    "cap, rows of the lowest number": ("cap", 0.7, (1, 2, 1, 20, 20, 32, 32, "lowest", False, "float32")),
    "cap, large logits": ("cap", 20.0, (1, 1, 1, 40, 40, 32, 32, "sharp", False, "float32")),
    "cap that changes nothing": ("cap", 1e5, (1, 1, 1, 40, 40, 32, 32, "none", False, "float32")),
    "cap, packed rows": ("cap", 0.7, (4, 4, 2, 33, 33, 32, 32, "sequences", True, "float32")),
    "cap, head size 80": ("cap", 0.7, (1, 2, 1, 67, 67, 80, 80, "none", True, "float32")),
    "cap, head size 256": ("cap", 0.7, (1, 1, 1, 40, 40, 256, 256, "none", True, "float32")),
    "cap, bf16": ("cap", 0.7, (1, 2, 1, 150, 150, 64, 64, "none", True, "bfloat16")),
    "cap, bf16, head size 128": ("cap", 0.7, (1, 2, 1, 70, 70, 128, 128, "padding", False, "bfloat16")),
    "cap, fp16, head size 256": ("cap", 0.7, (1, 1, 1, 70, 70, 256, 256, "none", True, "float16")),
    "past": ("past", 0.0, (2, 3, 1, 37, 37, 32, 32, "none", True, "float32")),
    "past, a mask that is causal": ("past", 0.0, (1, 2, 1, 40, 40, 32, 32, "padding", True, "float32")),
    "past, additive mask": ("past", 0.0, (1, 2, 1, 20, 20, 32, 32, "additive", True, "float32")),
    "past, grouped": ("past", 0.0, (2, 4, 2, 37, 37, 24, 40, "none", True, "float32")),
    "past, fp16": ("past", 0.0, (1, 2, 1, 150, 150, 64, 64, "none", True, "float16")),
    "between": ("between", 0.0, (2, 3, 1, 37, 37, 32, 32, "none", False, "float32")),
    "between, a row without any key": ("between", 0.0, (1, 2, 1, 20, 20, 32, 32, "empty", False, "float32")),
    "between, rows of the lowest number": ("between", 0.0, (1, 2, 1, 20, 20, 32, 32, "lowest", False, "float32")),
    "between, padding, grouped": ("between", 0.0, (2, 6, 3, 70, 70, 80, 80, "padding", False, "float32")),
    "between, packed rows": ("between", 0.0, (4, 2, 1, 33, 33, 32, 32, "sequences", False, "float32")),
    "between, bf16": ("between", 0.0, (1, 2, 1, 150, 150, 64, 64, "none", False, "bfloat16")),
    "stable": ("stable", 2.0, (2, 2, 1, 37, 41, 32, 32, "none", False, "float32")),
    "stable, causal, repeated": ("stable", 2.0, (1, 2, 1, 70, 70, 32, 32, "repeated", True, "float32")),
    "stable, repeated below 0": ("stable", 2.0, (1, 2, 1, 70, 70, 32, 32, "negative", False, "float32")),
    "stable, large logits": ("stable", 8.0, (1, 1, 1, 40, 40, 32, 32, "sharp", False, "float32")),
    "stable, boolean mask": ("stable", 2.0, (2, 4, 2, 20, 33, 24, 40, "bool", False, "float32")),
    "stable, a row without any key": ("stable", 2.0, (1, 2, 1, 20, 20, 32, 32, "empty", False, "float32")),
    "stable, rows of the lowest number": ("stable", 2.0, (1, 2, 1, 20, 20, 32, 32, "lowest", False, "float32")),
    "stable, fp16, repeated": ("stable", 8.0, (1, 2, 1, 150, 150, 64, 64, "repeated", True, "float16")),
    "stable, bf16, repeated": ("stable", 2.0, (1, 2, 1, 150, 150, 64, 64, "repeated", True, "bfloat16")),
    "pick": ("pick", 1e-8, (2, 2, 1, 37, 41, 32, 32, "none", False, "float32")),
    "pick, causal": ("pick", 1e-8, (1, 2, 1, 70, 70, 32, 32, "none", True, "float32")),
    "pick, a large eps": ("pick", 3.0, (1, 2, 1, 20, 33, 32, 32, "bool", False, "float32")),
    "pick, nothing above 0": ("pick", 1e-2, (1, 2, 1, 70, 70, 32, 32, "negative", False, "float32")),
    "pick, large logits": ("pick", 1e-8, (1, 1, 1, 40, 40, 32, 32, "sharp", False, "float32")),
    "pick, a row without any key": ("pick", 1e-8, (1, 2, 1, 20, 20, 32, 32, "empty", False, "float32")),
    "pick, additive mask": ("pick", 1e-8, (1, 2, 1, 20, 20, 32, 32, "additive", False, "float32")),
    "pick, rows of the lowest number": ("pick", 1e-8, (1, 2, 1, 20, 20, 32, 32, "lowest", False, "float32")),
    "pick, causal, padding, grouped": ("pick", 1e-8, (1, 6, 3, 40, 40, 24, 40, "padding", True, "float32")),
    "pick, packed rows": ("pick", 1e-8, (4, 4, 2, 33, 33, 32, 32, "sequences", True, "float32")),
    "pick, bf16": ("pick", 1e-8, (1, 2, 1, 150, 150, 64, 64, "none", True, "bfloat16")),
    "pick, fp16, head size 128": ("pick", 1e-8, (1, 2, 1, 70, 70, 128, 128, "padding", False, "float16")),
}


def given(kind, number, sizes):
    """The tensors of a case; repeated keys come twice, all logits then of one sign."""
    *numbers, mask, causal, dtype = sizes
    repeated = mask in ("repeated", "negative")
    q, k, v, made, causal, scale = inputs(*numbers, "none" if repeated else mask, causal, dtype)
    if repeated:
        half = k.shape[2] // 2
        k[:, :, half:] = k[:, :, :half]
        q, k = q.abs(), k.abs() * (-1 if mask == "negative" else 1)
    by = torch.tensor(number)
    if kind in ("past", "between"):
        gates = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=torch.Generator().manual_seed(5))
        by = torch.nn.functional.logsigmoid(gates).cumsum(1)
    return q, k, v, made, causal, scale, kind, by


def textbook(q, k, v, mask, causal, scale, kind, by):
    """The same on the whole matrix in fp64, with autograd's gradients of a random sum of both outputs."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v, by)]
    share = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(share, 1) for x in leaves[1:3])
    s = leaves[0] @ keys.mT * scale
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.double()
    if kind == "cap":
        s = by.double() * torch.tanh(s / by.double())
    elif kind not in ("stable", "pick"):
        sums = leaves[3].transpose(1, 2)
        between = sums[..., :, None] - sums[..., None, :]
        s = s + (between if kind == "past" else -between.abs())
    # For a softmax the lowest number of a dtype is a small logit, for the others such a key is none.
    hides = mask if kind in ("cap", "pick") or mask is None or mask.dtype == torch.bool else None
    seen = allowed_keys(hides, causal, slice(0, q.shape[2]), k.shape[2], q.device)
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf"))
    empty = (s == float("-inf")).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    a, lse = s.softmax(-1).masked_fill(empty, 0.0), s.logsumexp(-1).masked_fill(empty[..., 0], 0.0)
    if kind == "pick":
        size = torch.expm1(s).masked_fill(empty if seen is None else ~seen.expand_as(s), 0.0)
        total = size.abs().sum(-1) + by.double()
        a, lse = size.relu() / total[..., None], total.log()
    outputs = [a @ values, lse]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(outputs)]
    # Rows that a lowest number forbids as a whole have a value, but no gradient.
    gone = lse < -1e6
    outputs[1] = lse.masked_fill(gone, 0.0)
    weights = [weights[0].masked_fill(gone[..., None], 0.0), weights[1].masked_fill(gone, 0.0)]
    total = sum((w * x).sum() for w, x in zip(weights, outputs, strict=True))
    wanted = leaves if kind in ("past", "between") else leaves[:3]
    return outputs, weights, torch.autograd.grad(total, wanted)


def run(name):
    """Return the largest error of each output and gradient, over the largest wanted number."""
    tensors = given(*CASES[name])
    assert plain(*tensors[:3])
    outputs, weights, gradients = textbook(*tensors)
    q, k, v, mask, causal, scale, kind, by = tensors
    out, lse = triton_edited.forward(*tensors)
    g_out, g_lse = weights[0].to(out.dtype), weights[1]
    made = triton_edited.backward(g_out, g_lse, [q, k, v, out, lse, by], mask, causal, scale, kind)
    # Without the log-sum-exp's gradient another kernel runs.
    alone = triton_edited.backward(g_out, None, [q, k, v, out, lse, by], mask, causal, scale, kind)
    none = triton_edited.backward(g_out, torch.zeros_like(lse), [q, k, v, out, lse, by], mask, causal, scale, kind)
    same = all(torch.equal(a, b) for a, b in zip(alone[:3], none[:3], strict=True))
    found = (out, lse.masked_fill(lse < -1e6, 0.0), *made[: len(gradients)])
    names = ("output", "log-sum-exp", "dq", "dk", "dv", "numbers")
    return {
        part: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)).item()
        for part, a, b in zip(names, found, (*outputs, *gradients))
    } | {"same": 0.0 if same else 1.0}


@triton.jit
def tanh_kernel(x_at, y_at, SIZE: tl.constexpr):
    """Write tanh of numbers."""
    i = tl.arange(0, SIZE)
    tl.store(y_at + i, triton_edited.tanh(tl.load(x_at + i)))


@triton.jit
def reference_kernel(x_at, y_at, number, near, half, ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Write the reference of rows of TILES tiles."""
    i, j = tl.arange(0, ROWS), tl.arange(0, TILE)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    second, r = m, m
    for at in tl.static_range(TILES):
        s = tl.load(x_at + i[:, None] * (TILE * TILES) + at * TILE + j[None, :])
        m, second, r = triton_edited._reference(s, m, second, number, near, half, ROWS)
    tl.store(y_at + i, r)


def parts():
    """Print the largest relative error of tanh over all magnitudes, whether nan stays, and of references."""
    size = 1 << 16
    x = torch.cat([torch.logspace(-37, 38, size // 2), torch.linspace(0, 12, size // 2)])
    x *= torch.tensor([1.0, -1.0]).repeat(size // 2)
    x[:3] = torch.tensor([float("inf"), float("-inf"), 0.0])
    y = torch.empty_like(x)
    tanh_kernel[(1,)](x, y, SIZE=size)
    want = x.double().tanh()
    error = ((y.double() - want).abs() / want.abs().clamp(min=1e-300)).max().item()
    x[0] = float("nan")
    tanh_kernel[(1,)](x, y, SIZE=size)
    # Rows in three tiles: the largest repeats or nearly repeats in a tile, across tiles, or not at all.
    none = float("-inf")
    rows = torch.tensor(
        [
            [3.0, 1.0, 2.0, 0.0, 1.0, 2.0],
            [3.0, 3.0, 2.0, 0.0, 1.0, 2.0],
            [3.0, 1.0, 2.0, 3.0, 1.0, 2.0],
            [1.0, 3.0, 2.0, 0.0, 2.999, 2.0],
            [3.0, 3.0, 2.0, 4.0, 1.0, 2.0],
            [-3.0, -5.0, -4.0, -4.0, -3.0, -9.0],
            [90.0, 1.0, 2.0, 90.0, 1.0, 2.0],
            [none, none, none, none, none, none],
            [none, none, none, 5.0, none, none],
            [none, 5.0, none, none, none, 5.0],
        ]
    )
    wanted = torch.tensor([3.0, 6.0, 6.0, 6.0, 4.0, 0.0, 153.0, none, 5.0, 10.0])
    padded = torch.full((16, 6), none)
    padded[:10] = rows
    found = torch.empty(16)
    reference_kernel[(1,)](padded, found, 2.0, 0.0028, 63.0, ROWS=16, TILE=2, TILES=3)
    right = torch.equal(found[:10], wanted)
    print(json.dumps({"error": error, "nan": bool(y[0].isnan()), "references": right}))


# methods, and the calls that the kernels compute
METHODS = {
    "SoftCap(cap=0.3)": "plain causal padded left-padded sliding cross grouped bias sinks padded-sinks",
    "StableSoftmax()": "plain causal padded left-padded sliding cross grouped bias sinks padded-sinks",
    "ForgettingAttention(bias=2.0)": "plain causal padded left-padded sliding grouped bias sinks padded-sinks",
    "Temperature(value=0.5) + ForgettingAttention(bias=2.0)": "plain causal",
    "ForgettingAttention(bias=2.0) + Temperature(value=0.5)": "",
    "ForgettingAttention(bias=2.0) + EntropyPenalty(strength=1.0)": "",
    "ForgettingAttention(bias=2.0) + RelaxedAttention(gamma=0.3)": "plain bias",
    "Temperature(value=0.5) + SoftCap(cap=0.3)": "plain causal",
    "SoftCap(cap=0.3) + Temperature(value=0.5)": "",
    "SoftCap(cap=0.3) + DropKey(p=0.4, unit='column')": "plain causal bias",
    "DropAttention(p=0.4) + ForgettingAttention(bias=2.0)": "plain bias",
    "SoftCap(cap=0.3) + DropKey(p=0.4)": "",
    "DropKey(p=0.4) + SoftCap(cap=0.3)": "",
    "ForgettingAttention(bias=2.0) + SoftCap(cap=0.3)": "causal",
    "SoftCap(cap=0.3) + ForgettingAttention(bias=2.0)": "",
    "SoftCap(cap=0.3) + ReAttention(norm='none')": "plain causal bias",
    "SoftCap(cap=0.3) + EntropyPenalty(strength=1.0)": "",
    "SoftCap(cap=0.3) + StableSoftmax()": "",
    "StableSoftmax() + EntropyPenalty(strength=1.0)": "plain causal bias",
    "StableSoftmax() + DropKey(p=0.4, unit='column')": "plain causal bias",
    "Softpick()": "plain causal padded left-padded sliding cross grouped bias",
    "Temperature(value=0.5) + Softpick()": "plain causal",
    "Softpick() + DropKey(p=0.4, unit='column')": "plain causal bias",
    "Softpick() + DropAttention(p=0.4)": "",
    "DropAttention(p=0.4) + Softpick()": "",
    "Softpick() + RelaxedAttention(gamma=0.3)": "plain causal bias",
    "Softpick() + EntropyPenalty(strength=1.0)": "",
}


def methods():
    """Print the kernels that compute calls of methods, and the largest differences from the matrix."""
    from headwise.attend.methods.text import parse
    from headwise.testing.calls import KINDS, run, why_not

    kernels.operators_run_on = lambda device: True
    for text in sys.argv[2:] or METHODS:
        made = parse(text)
        for kind in KINDS if "+" not in text else ("plain", "causal", "bias"):
            # Softpick refuses sinks in the call.
            if any(why_not(method, kind) for method in made) or ("Softpick" in text and "sinks" in kind):
                continue
            fast, whole = (run(made, kind, form) for form in ("fast", "textbook"))
            pairs = [(fast.out, whole.out), *((fast.grads[n], g) for n, g in whole.grads.items() if g is not None)]
            error = max(((a - b).norm() / (b.norm() + 2e-2)).item() for a, b in pairs)
            expected = kind.replace(" ", "-") in METHODS[text].split()
            right = ("edited logits" in fast.kernels) == expected
            print(json.dumps({"methods": text, "kind": kind, "error": error, "kernel": right}), flush=True)


def calls():
    """Print what holds of the ways to call the kernels: eager, seen by a mode, compiled, twice differentiated."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint

    from headwise.attend.attention import edited_logits
    from headwise.lab.training.measuring import counter

    def results(attend, tensors, by):
        q, k, v, mask, causal, scale, kind, _ = tensors
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, by)]
        leaves[3].requires_grad_(by.dim() > 0)
        out, lse = attend(*leaves[:3], mask, causal, scale, kind, leaves[3])
        loss = out.square().sum() + lse.sum()
        return [out, lse, *torch.autograd.grad(loss, [x for x in leaves if x.requires_grad])]

    compiled = torch.compile(edited_logits.attend_edited, backend="aot_eager", fullgraph=True)
    for name in ("cap, causal, padding, grouped", "between", "stable"):
        tensors = given(*CASES[name])
        by = tensors[-1]
        eager = results(edited_logits.attend_edited, tensors, by)
        with counter() as count:
            seen = results(edited_logits.attend_edited, tensors, by)
        q, k, v = tensors[:3]
        products = 2 * q[..., 0].numel() * k.shape[2]
        flops = products * (4 * q.shape[3] + 3 * v.shape[3])
        again = results(lambda *args: checkpoint(edited_logits.attend_edited, *args, use_reentrant=False), tensors, by)
        whole = results(compiled, tensors, by)
        found = {"counted": count.get_total_flops() / flops if k.shape[1] == q.shape[1] else 1.0}
        for way, others in (("seen", seen), ("again", again), ("compiled", whole)):
            found[way] = all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(eager, others, strict=True))
        registered = edited_logits._operator.registered
        torch.library.opcheck(
            registered, (*tensors[:3], by, *tensors[3:-1]), test_utils=("test_schema", "test_faketensor")
        )
        print(json.dumps({"case": name, **found}), flush=True)
    q, k, v, mask, causal, scale, kind, by = given(*CASES["cap, bf16"])
    q.requires_grad_()
    out, _ = edited_logits.attend_edited(q, k, v, mask, causal, scale, kind, by)
    (first,) = torch.autograd.grad(out.float().sum(), q, retain_graph=True)
    # A cap that set() changes before backward.
    by.fill_(9.0)
    (after,) = torch.autograd.grad(out.float().sum(), q, retain_graph=True)
    (graph,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
    said = ""
    try:
        graph.float().sum().backward()
    except RuntimeError as error:
        said = str(error)
    kernels.operators_run_on = lambda device: True
    inside = edited_logits.edits_run(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):
        outside = edited_logits.edits_run(q, k, v)
    same = torch.equal(first, after) and torch.equal(first, graph)
    print(json.dumps({"case": "again", "same": same, "said": said, "inside": inside, "outside": outside}))


def compile_all():
    """Compile what forward and backward launch: print the shared memory, registers and spilled bytes."""
    kinds = (
        ("cap", "bfloat16", 64, "none", True),
        ("stable", "bfloat16", 64, "none", True),
        ("past", "bfloat16", 64, "padding", True),
        ("between", "bfloat16", 64, "none", False),
        ("cap", "bfloat16", 128, "none", True),
        ("between", "bfloat16", 128, "padding", False),
        ("cap", "float16", 256, "none", True),
        ("cap", "float32", 64, "additive", False),
        ("stable", "float32", 256, "none", True),
        ("pick", "bfloat16", 64, "none", True),
        ("pick", "float16", 128, "padding", False),
    )
    for capability, case in itertools.product(map(int, sys.argv[2:] or (80, 90, 100)), kinds):
        kind, dtype, size, mask, causal = case
        tensors = given(kind, 2.0, (1, 4, 2, 512, 512, size, size, mask, causal, dtype))
        q, k, v, mask, causal, scale, kind, by = tensors
        with compiled_instead_of_launched(capability) as made:
            out, lse = triton_edited.forward(*tensors)
            triton_edited.backward(out, None, [q, k, v, out, lse, by], mask, causal, scale, kind)
        for line in made:
            print(json.dumps({"capability": capability, "case": " ".join(map(str, case)), **line}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    elif sys.argv[1] in ("parts", "methods", "calls"):
        {"parts": parts, "methods": methods, "calls": calls}[sys.argv[1]]()
    else:
        for case in sys.argv[2:] or CASES:
            print(json.dumps({"case": case, **run(case)}), flush=True)
