"""Runs the Triton kernels that drop single weights: interpreted against the textbook, or compiled for other GPUs.

TRITON_INTERPRET=1 python tests/kernels/triton_dropped_cases.py run    prints for each case its largest errors
python tests/kernels/triton_dropped_cases.py compile                   prints for each kernel what it needs
"""

import json
import sys

import torch
from triton_cases import inputs
from triton_process import compiled_instead_of_launched

from headwise.attend.attention import dropped_elements, triton_dropped
from headwise.attend.attention.element_draw import Drawn
from headwise.attend.core.random_draws import uniform_matrix
from headwise.numerics.kernels import plain
from headwise.numerics.masked import allowed_keys

KEY, SALT = 0xFEDCBA98, 0x7FFFFFF1
CASES = {
    # name: (batch, heads, queries, keys, size, size of values, mask, causal, dtype), p, window, renormalize, draws
    "dropout": ((2, 2, 20, 20, 32, 32, "none", False, "float32"), 0.3, 1, False, 2),
    "dropout, causal": ((1, 2, 70, 70, 64, 64, "none", True, "float32"), 0.1, 1, False, 1),
    "dropout, boolean mask": ((2, 2, 20, 33, 32, 32, "bool", False, "float32"), 0.5, 1, False, 2),
    "dropout, an empty row": ((1, 2, 20, 20, 32, 32, "empty", False, "float32"), 0.3, 1, False, 1),
    "dropout, additive mask": ((1, 2, 20, 20, 32, 32, "additive", False, "float32"), 0.3, 1, False, 1),
    "dropout, windows of two samples": ((6, 2, 9, 9, 16, 16, "none", False, "float32"), 0.3, 1, False, 2),
    "dropout, other sizes": ((1, 2, 37, 21, 24, 40, "none", False, "float32"), 0.3, 1, False, 1),
    "dropout, more queries than keys": ((1, 1, 40, 5, 16, 16, "none", True, "float32"), 0.3, 1, False, 1),
    "dropout, fp16": ((1, 2, 40, 40, 32, 32, "padding", True, "float16"), 0.3, 1, False, 1),
    "dropout, bf16": ((1, 2, 150, 150, 64, 64, "none", True, "bfloat16"), 0.3, 1, False, 1),
    "keys": ((2, 2, 20, 20, 32, 32, "none", False, "float32"), 0.3, 1, True, 2),
    "keys, most of them": ((1, 2, 20, 9, 32, 32, "none", False, "float32"), 0.9, 1, True, 1),
    "keys, causal": ((1, 2, 70, 70, 32, 32, "none", True, "float32"), 0.7, 1, True, 1),
    "keys, boolean mask": ((2, 2, 20, 33, 32, 32, "bool", False, "float32"), 0.9, 1, True, 2),
    "keys, causal, padding": ((2, 1, 40, 40, 32, 32, "padding", True, "float32"), 0.7, 1, True, 2),
    "keys, an empty row": ((1, 2, 20, 20, 32, 32, "empty", False, "float32"), 0.7, 1, True, 1),
    "keys, additive mask": ((1, 2, 20, 20, 32, 32, "additive", False, "float32"), 0.9, 1, True, 1),
    "keys, forbidden by numbers": ((1, 2, 20, 20, 32, 32, "lowest", False, "float32"), 0.9, 1, True, 1),
    "keys, large logits": ((1, 1, 40, 40, 32, 32, "sharp", False, "float32"), 0.5, 1, True, 1),
    "keys, windows of three": ((1, 2, 20, 40, 32, 32, "none", True, "float32"), 0.2, 3, True, 1),
    "keys, head size 80": ((1, 2, 67, 67, 80, 80, "padding", True, "float32"), 0.5, 1, True, 1),
    "keys, head size 256": ((1, 1, 40, 40, 256, 256, "none", True, "float32"), 0.5, 1, True, 1),
    "keys, bf16": ((1, 2, 150, 150, 64, 64, "padding", True, "bfloat16"), 0.5, 1, True, 1),
    "keys, fp16": ((1, 1, 70, 70, 128, 128, "none", False, "float16"), 0.5, 1, True, 1),
}


def given(sizes):
    """The tensors of a case; "lowest" forbids keys of some rows, and all of others, by a dtype's lowest number."""
    batch, heads, queries, keys, size, size_v, mask, causal, dtype = sizes
    kind = "empty" if mask == "lowest" else mask
    q, k, v, made, causal, scale = inputs(batch, heads, 1, queries, keys, size, size_v, kind, causal, dtype)
    if mask == "lowest":
        made = torch.zeros(made.shape).masked_fill(~made, torch.finfo(torch.float32).min)
    return q, k, v, made, causal, scale


def textbook(q, k, v, mask, causal, scale, p, window, renormalize, draws):
    """The same on the whole matrix in fp64, as the papers write it, with autograd's gradients."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].mT * scale
    (batch, heads, queries), keys = q.shape[:3], k.shape[2]
    u = uniform_matrix(KEY, SALT, (draws, heads, queries, keys), q.device).repeat_interleave(batch // draws, 0)
    starts = u < torch.tensor(p)
    dropped = starts.clone()
    for step in range(1, window):
        dropped[..., step:] |= starts[..., :-step]
    keep = ~dropped
    allowed = allowed_keys(mask, causal, slice(0, queries), keys, q.device)
    allowed = torch.ones_like(keep) if allowed is None else allowed.expand(keep.shape)
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.double()
        seen = allowed_keys(None, causal, slice(0, queries), keys, q.device)
    else:
        seen = allowed
    if renormalize:
        lost = allowed.any(-1, keepdim=True) & ~(keep & allowed).any(-1, keepdim=True)
        keep = keep | (lost & allowed & (allowed.cumsum(-1) == 1))
        seen = keep if seen is None else keep & seen
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf"))
    empty = (s == float("-inf")).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    a, lse = s.softmax(-1).masked_fill(empty, 0.0), s.logsumexp(-1).masked_fill(empty[..., 0], 0.0)
    a = a if renormalize else a * keep / (1 - p)
    outputs = [a @ leaves[2], lse]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(outputs)]
    # Rows that a lowest number forbids as a whole have a value, but no gradient.
    gone = lse < -1e6
    outputs[1] = lse.masked_fill(gone, 0.0)
    weights = [weights[0].masked_fill(gone[..., None], 0.0), weights[1].masked_fill(gone, 0.0)]
    total = sum((w * x).sum() for w, x in zip(weights, outputs, strict=True))
    return outputs, weights, torch.autograd.grad(total, leaves)


def found(form, q, k, v, mask, causal, scale, p, window, renormalize, draws, weights):
    """Outputs and gradients of the kernels, or of the blocks in Python."""
    drawn = Drawn(q, k, torch.tensor(KEY), SALT, torch.tensor(p), window, draws)
    run = triton_dropped if form == "kernels" else None
    forward, backward = (run.forward, run.backward) if run else (dropped_elements._forward, dropped_elements._backward)
    out, lse, first = forward(q, k, v, mask, causal, scale, drawn, renormalize)
    g_out = weights[0].to(out.dtype)
    # As the operator does before either.
    lse = lse.masked_fill(lse < -1e6, float("inf"))
    level = weights[1] - torch.linalg.vecdot(g_out.float(), out.float())
    made = backward(g_out, level, q, k, v, lse, first, mask, causal, scale, drawn, renormalize)
    return out, lse.masked_fill(lse == float("inf"), 0.0), *made


def run(name, form):
    """Return the largest error of each output and gradient, over the largest wanted number."""
    sizes, *settings = CASES[name]
    tensors = given(sizes)
    assert plain(*tensors[:3])
    outputs, weights, gradients = textbook(*tensors, *settings)
    parts = zip(("output", "log-sum-exp", "dq", "dk", "dv"), found(form, *tensors, *settings, weights), strict=True)
    return {
        part: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)).item()
        for (part, a), b in zip(parts, (*outputs, *gradients), strict=True)
    }


def compile_all():
    """Compile what a training step launches, of each kind of tile one, with masks and without."""
    kinds = [(torch.bfloat16, 64, True, None), (torch.bfloat16, 128, False, None), (torch.bfloat16, 256, True, None)]
    kinds += [(torch.float16, 80, False, torch.bool), (torch.float32, 64, True, torch.float32)]
    for capability in map(int, sys.argv[2:] or ("80", "90", "100")):
        for dtype, size, causal, masked in kinds:
            # As a fused projection leaves them: strides that sixteen divides.
            q, k, v = torch.zeros(2, 256, 3, 4, size, dtype=dtype).permute(2, 0, 3, 1, 4)
            mask = None if masked is None else torch.ones(2, 1, 256, 256, dtype=masked)
            drawn = Drawn(q, k, torch.tensor(KEY), SALT, torch.tensor(0.1), 1, 2)
            for renormalize in (False, True):
                with compiled_instead_of_launched(capability) as made:
                    out, lse, first = triton_dropped.forward(q, k, v, mask, causal, 0.125, drawn, renormalize)
                    triton_dropped.backward(out, lse, q, k, v, lse, first, mask, causal, 0.125, drawn, renormalize)
                for line in made:
                    case = [str(dtype).split(".")[1], size, causal, str(masked), renormalize]
                    print(json.dumps({"capability": capability, "case": case, **line}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        for case in sys.argv[2:] or CASES:
            for form in ("kernels", "blocks"):
                print(json.dumps({"case": case, "form": form, **run(case, form)}), flush=True)
