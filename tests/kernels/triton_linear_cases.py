"""Runs the Triton kernels of linear attention: interpreted beside the PyTorch form in fp64, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_linear_cases.py run    prints for each case its largest errors
python tests/kernels/triton_linear_cases.py compile                   prints for each launch what it needs
"""

import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.attend.attention import linear

CASES = {
    # name: (batch, heads, queries, keys, size, size of values, share, causal, dtype)
    "all keys": (2, 3, 37, 70, 24, 24, "none", False, "float32"),
    "causal": (1, 2, 131, 131, 32, 32, "none", True, "float32"),
    "one token": (1, 2, 1, 1, 16, 16, "none", True, "float32"),
    "padding": (2, 2, 70, 70, 32, 32, "padding", False, "float32"),
    "causal, padding on the left": (2, 2, 100, 100, 32, 32, "left", True, "float32"),
    "causal, weights by head": (2, 2, 65, 65, 16, 16, "heads", True, "float32"),
    "wider values": (1, 2, 70, 70, 40, 80, "none", True, "float32"),
    "head size 128": (1, 1, 70, 70, 128, 128, "none", True, "float32"),
    "bf16": (1, 2, 133, 133, 64, 64, "none", True, "bfloat16"),
    "fp16": (2, 2, 70, 70, 64, 64, "padding", False, "float16"),
}


def inputs(batch, heads, queries, keys, size, size_v, share, causal, dtype):
    """Return q, k, v as hosts give them, the share of each key, and whether the call is causal."""
    g = torch.Generator().manual_seed(0)

    def made(rows, width):
        return torch.randn(batch, rows, heads, width, generator=g).transpose(1, 2).to(getattr(torch, dtype))

    given = made(queries, size), made(keys, size), made(keys, size_v)
    shares = {
        "none": None,
        "padding": (torch.arange(keys) < torch.tensor([[[keys - 3]], [[keys - 30]]])[:batch]).float(),
        "left": (torch.arange(keys) >= torch.tensor([[[3]], [[70]]])[:batch]).float(),
        "heads": torch.rand(1, heads, keys, generator=g),
    }
    return given, shares[share], causal


def run(name):
    """Return the largest error of the output and of each gradient, over the largest number wanted."""
    given, share, causal = inputs(*CASES[name])
    wide = [x.double().requires_grad_() for x in given]
    given = [x.requires_grad_() for x in given]
    wanted = linear.form(*wide, None if share is None else share.double(), causal)
    found, _ = linear._by_kernel(*given, share, causal)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(100))
    right = torch.autograd.grad(wanted, wide, weights.double())
    made = torch.autograd.grad(found, given, weights.to(found.dtype))
    assert found.dtype == given[2].dtype and all(a.dtype == b.dtype for a, b in zip(made, given, strict=True))
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=0.1)).item()
        for a, b in zip((found, *made), (wanted, *right), strict=True)
    ]


def compile_all():
    """Compile what forward and backward launch."""
    kinds = (
        (64, 64, "none", True, "bfloat16"),
        (64, 64, "padding", False, "bfloat16"),
        (128, 128, "none", True, "float16"),
        (32, 32, "none", True, "float32"),
    )
    for capability in map(int, sys.argv[2:] or (80, 90, 100)):
        for size, size_v, kind, causal, dtype in kinds:
            given, share, causal = inputs(2, 4, 512, 512, size, size_v, kind, causal, dtype)
            given = [x.requires_grad_() for x in given]
            with compiled_instead_of_launched(capability) as made:
                found, _ = linear._by_kernel(*given, share, causal)
                torch.autograd.grad(found, given, torch.ones_like(found))
            for line in made:
                print(json.dumps({"capability": capability, "case": f"{dtype} {size}", **line}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        for case in sys.argv[2:] or CASES:
            print(json.dumps({"case": case, "errors": run(case)}), flush=True)
    else:
        compile_all()
