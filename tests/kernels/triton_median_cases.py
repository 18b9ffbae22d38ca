"""Runs the Triton kernels of medians: interpreted beside torch's median, or compiled for GPUs that are not here.

TRITON_INTERPRET=1 python tests/kernels/triton_median_cases.py run      prints for each case the largest difference
python tests/kernels/triton_median_cases.py compile                     prints for each kernel what it needs
"""

import itertools
import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.numerics import triton_medians
from headwise.numerics.medians import row_medians

ROWS = {
    "normal": lambda *shape: torch.randn(shape),
    "positive": lambda *shape: torch.rand(shape) + 1,
    "negative": lambda *shape: -torch.rand(shape) - 1e-3,
    "few values": lambda *shape: torch.randint(-2, 3, shape).float(),
    "one value": lambda *shape: torch.full(shape, -0.3),
    "tiny and huge": lambda *shape: torch.randn(shape) * 10.0 ** torch.randint(-30, 30, shape),
    "a nan": lambda *shape: torch.randn(shape).index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(torch.nan)),
}


def run():
    """Print for each kind of rows, dtype and size the largest difference, and whether the nans are where they are."""
    torch.manual_seed(0)
    for (name, make), dtype, count in itertools.product(
        ROWS.items(), triton_medians.PASSES, (5, 8192, 2 * triton_medians.PART + 7)
    ):
        x = make(3, count).to(dtype)
        for centered in (False, True):
            center = x.float().nanmean(1) if centered else None
            found, right = triton_medians.medians(x, center), row_medians(x, center)
            same = bool((found.isnan() == right.isnan()).all())
            error = (found - right).nan_to_num(0.0).abs().max().item()
            print(json.dumps({"rows": name, "error": error, "nans": same}), flush=True)


def compile_all():
    """Compile what the levels of InputNoise launch."""
    for capability in (80, 90, 100):
        with compiled_instead_of_launched(capability) as made:
            for dtype, centered in ((torch.bfloat16, False), (torch.float32, True)):
                x = torch.zeros(16, 1 << 16, dtype=dtype)
                triton_medians.medians(x, torch.zeros(16) if centered else None)
        for line in made:
            print(json.dumps({"capability": capability, **line}), flush=True)


if __name__ == "__main__":
    {"run": run, "compile": compile_all}[sys.argv[1]]()
