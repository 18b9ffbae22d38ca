"""Runs the kernels of `sink_rows`, in a process of its own: interpreted against torch's operations, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_sink_cases.py run       prints one JSON line per case: its errors
python tests/kernels/triton_sink_cases.py compile                      prints one per launch: what it needs of a GPU
"""

import itertools
import json
import sys

import torch

CASES = [(d, size) for d in ("float32", "bfloat16", "float16") for size in (24, 64, 128, 256)]


def inputs(dtype, size, tokens=83):
    g = torch.Generator().manual_seed(0)
    # The gradient is not in the order of the output's memory, and expanded over samples.
    out = torch.randn(2, tokens, 3, size, generator=g).transpose(1, 2).to(getattr(torch, dtype))
    of_out = torch.randn(1, 3, tokens, size, generator=g).to(out.dtype).expand(2, -1, -1, -1)
    lse = 3 * torch.randn(2, 3, tokens, generator=g)
    lse[:, :, 5] = 200.0
    lse[:, :, 6] = -200.0
    return of_out, out, lse, torch.tensor([-1.0, 0.5, 4.0])


def run():
    from headwise.attend.attention import sink_rows, triton_sinks

    for dtype, size in CASES:
        of_out, out, lse, sinks = inputs(dtype, size)
        right, total = sink_rows.lowered(out.double(), lse.double(), sinks)
        of_sinks = sink_rows.slopes(of_out.double(), right, total, sinks.double())
        terms = (sinks.double()[:, None] - total).exp() * (of_out.double() * right).abs().sum(-1)
        sizes = terms.abs().sum((0, 2))
        found, found_total = triton_sinks.lowered(out.clone(), lse.clone(), sinks)
        found_slopes = triton_sinks.slopes(of_out, found, found_total, sinks)
        errors = {
            "output": (found.double() - right).abs().max() / right.abs().max(),
            "total": (found_total.double() - total).abs().max() / total.abs().max(),
            # relative to the sum of what cancels in it
            "sinks": ((found_slopes.double() - of_sinks).abs() / sizes).max(),
        }
        print(json.dumps({"case": f"{dtype} {size}", **{k: float(v) for k, v in errors.items()}}), flush=True)


def compile_all():
    from triton_process import compiled_instead_of_launched

    from headwise.attend.attention.triton_sinks import lowered, slopes

    for capability, size in itertools.product((80, 90, 100), (64, 256)):
        with compiled_instead_of_launched(capability) as made:
            of_out, out, lse, sinks = inputs("bfloat16", size, 512)
            lowered(out, lse, sinks)
            slopes(of_out, out, lse, sinks)
        for line in made:
            print(json.dumps({"capability": capability, "case": str(size), **line}), flush=True)


if __name__ == "__main__":
    run() if sys.argv[1] == "run" else compile_all()
