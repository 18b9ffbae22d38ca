"""Runs the Triton kernel that cuts singular values: interpreted beside a decomposition, or compiled for GPUs not here.

TRITON_INTERPRET=1 python tests/kernels/triton_cap_cases.py run      prints for each matrix how it was cut
python tests/kernels/triton_cap_cases.py compile                     prints for each GPU what the kernel needs
"""

import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.attend.projections import spectral_cuts, triton_cap
from headwise.attend.projections.spectral_cuts import cut_by_values

SIZE, LIMIT = 36, 0.7


def matrices():
    """Return matrices by name; the largest singular value of most is some 1."""
    noise = torch.randn(SIZE, SIZE) / (2 * SIZE**0.5)
    turned = torch.linalg.qr(torch.randn(SIZE, SIZE))[0].contiguous()
    outer = torch.outer(turned[0], turned[1])
    full = cut_by_values(2 * noise, LIMIT)
    return {
        "far below": 0.3 * noise,
        "just below": 0.69 * noise / torch.linalg.matrix_norm(noise, 2),
        "a few above": noise,
        "most above": 3 * noise,
        "all equal": turned,
        "cut before": full,
        "cut before, and a step": full + 0.01 * noise,
        "cut before, and all grown": full * 1.03,
        "a large jump": full + 300 * outer,
        "a cold start": 20 * noise,
        "one direction": 5 * outer,
        "nothing": 0 * noise,
        "tall": torch.randn(100, 37) / 4,
        "wide": torch.randn(7, 130) / 4,
        "a row": torch.randn(1, 40),
        "a column": torch.randn(40, 1),
        "rows of a larger one": torch.randn(40, 90)[5:30, :70] / 10,
        "stored in columns": (torch.randn(50, 30) / 8).mT,
        "strided both ways": torch.randn(60, 50)[::2, ::2] / 6,
    }


def cut(given, limit):
    """Cut copies of matrices, which keep the strides, by the kernel; one launch for all."""
    made = []
    for x in given:
        base = torch.full((x.shape[0] * x.stride(0) + x.shape[1] * x.stride(1),), 7.0, dtype=x.dtype)
        made.append(torch.as_strided(base, x.shape, x.stride()).copy_(x))
    launches = []
    kernel = triton_cap.cap
    spectral_cuts.kernels_run_on = lambda device: True
    triton_cap.cap = lambda rows, limit: launches.append(len(rows)) or kernel(rows, limit)
    versions = [x._version for x in made]
    spectral_cuts.cut_all_(made, limit)
    triton_cap.cap = kernel
    assert launches == [len(made)]
    assert all(x._version > before for x, before in zip(made, versions, strict=True))
    return made


def run():
    """Print of each matrix: its largest singular value and the error, over the limit, and whether it kept its bits."""
    torch.manual_seed(0)
    some = ("far below", "a few above", "wide")
    for dtype, names in ((torch.float32, ()), (torch.bfloat16, some), (torch.float16, some[:2])):
        named = {name: x.to(dtype) for name, x in matrices().items() if not names or name in names}
        for (name, before), after in zip(named.items(), cut(list(named.values()), LIMIT), strict=True):
            exact = cut_by_values(before.double(), LIMIT)
            top = [torch.linalg.matrix_norm(x.double(), 2).item() for x in (before, after, after - exact)]
            figures = {"before": top[0] / LIMIT, "top": top[1] / LIMIT, "error": top[2] / LIMIT}
            print(json.dumps({"case": name, "dtype": str(dtype), **figures, "same": torch.equal(before, after)}))
    # again from the same numbers, alone
    (first, second), (alone,) = (cut([x] * n, LIMIT) for x, n in ((matrices()["a few above"], 2),) for n in (2, 1))
    assert torch.equal(first, alone) and torch.equal(second, alone)
    odd = [torch.full((20, 20), float("nan")), torch.full((20, 20), float("inf")), torch.randn(20, 20)]
    left = cut([*odd, torch.randn(20, 20)], 1e30)
    assert left[0].isnan().all() and left[1].isinf().all() and torch.equal(left[2], odd[2])
    left = cut(odd, 0.5)
    assert left[0].isnan().all() and not left[1].isfinite().any()
    # one whose numbers are far from the limit takes several steps, and comes down in each
    far = torch.randn(6, 6) * 1e5
    for _ in range(40):
        before, (far,) = torch.linalg.matrix_norm(far, 2), cut([far], 1.0)
        if before <= 1.02:
            break
        assert torch.linalg.matrix_norm(far, 2) < 0.9 * before
    assert torch.linalg.matrix_norm(far, 2) <= 1.02


def compile_all():
    """Compile what a step of GPT-2 small launches."""
    for capability in (80, 90, 100):
        with compiled_instead_of_launched(capability) as made:
            for dtype in (torch.float32, torch.bfloat16):
                triton_cap.cap([torch.zeros(768, 768, dtype=dtype)] * 4, 1.0)
        for line in made:
            print(json.dumps({"capability": capability, **line}), flush=True)


if __name__ == "__main__":
    {"run": run, "compile": compile_all}[sys.argv[1]]()
