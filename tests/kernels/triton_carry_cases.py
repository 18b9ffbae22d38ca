"""Runs the kernel of `flash_rows.carry`, in a process of its own: interpreted against torch's operations, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_carry_cases.py run       prints one JSON line per case: its error
python tests/kernels/triton_carry_cases.py compile                      prints one per launch: what it needs of a GPU
"""

import itertools
import json
import sys

import torch

CASES = [(d, size) for d in ("float32", "bfloat16") for size in (24, 64, 128)]


def inputs(dtype, size, tokens=33):
    g = torch.Generator().manual_seed(0)
    of_out, out = (
        torch.randn(2, tokens, 3, size, generator=g).transpose(1, 2).to(getattr(torch, dtype)) for _ in range(2)
    )
    of_out[:, :, 3:7] = 0.0
    of_out[:, :, 8] *= 1e-12
    # Expanded over heads, as the gradient of a mean is.
    return of_out, out, torch.randn(2, 1, tokens, generator=g).expand(2, 3, tokens)


def run():
    from headwise.attend.attention.flash_rows import TINY, carried
    from headwise.attend.attention.triton_carry import carry

    for dtype, size in CASES:
        given = inputs(dtype, size)
        (new, moved), right = ([x.double() for x in made] for made in (carry(*given, TINY), carried(*given)))
        errors = [(new - right[0]).abs().max() / right[0].abs().max()]
        # Relative to each row, as a row with a small gradient is large.
        errors.append(((moved - right[1]).norm(dim=-1) / right[1].norm(dim=-1)).max())
        print(json.dumps({"case": f"{dtype} {size}", "error": max(map(float, errors))}), flush=True)


def compile_all():
    from triton_process import compiled_instead_of_launched

    from headwise.attend.attention.flash_rows import TINY
    from headwise.attend.attention.triton_carry import carry

    for capability, size in itertools.product((80, 90, 100), (64, 256)):
        with compiled_instead_of_launched(capability) as made:
            carry(*inputs("bfloat16", size, 512), TINY)
        for line in made:
            print(json.dumps({"capability": capability, "case": str(size), **line}), flush=True)


if __name__ == "__main__":
    run() if sys.argv[1] == "run" else compile_all()
