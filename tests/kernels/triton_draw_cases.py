"""Runs the Triton kernel of draws: interpreted beside the hash in PyTorch, or compiled for GPUs that are not here.

TRITON_INTERPRET=1 python tests/kernels/triton_draw_cases.py run      prints for each draw its largest difference
python tests/kernels/triton_draw_cases.py compile                     prints for each kernel what it needs
"""

import itertools
import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.attend.core import random_draws, triton_draws

CPU = torch.device("cpu")
KINDS = {
    "uniform": random_draws.UNIFORM,
    "normal": random_draws.NORMAL,
    "kept": random_draws.KEPT,
    "elements": random_draws.ELEMENTS,
    "factor": random_draws.FACTOR,
}
# the shape of the whole draw, and which of its rows are drawn
DRAWS = {
    "one number": ((), []),
    "seven": ((7,), []),
    "more than a block": ((2, 4, 33, 65), []),
    "all rows": ((2, 3, 9, 5), [0, 9]),
    "a block of rows": ((2, 3, 9, 5), [2, 6]),
    "the last row": ((3, 1, 700, 7), [699, 700]),
}
P = 0.3


def filled(kind, key, salt, shape, block):
    """Draw by the kernel, with a key of the host or of a tensor."""
    given, number = (key, 0) if isinstance(key, torch.Tensor) else (None, key)
    out = torch.empty(random_draws.part_of(list(shape), block), dtype=random_draws.DTYPES[kind])
    return triton_draws.draw(kind, given, number, salt, P, list(shape), block, out)


def wanted(kind, key, salt, shape, block):
    """Draw by the operators in int64, whose numbers results on disk depend on."""
    if kind == random_draws.NORMAL:
        return random_draws.normal(key, salt, shape, CPU)
    if kind == random_draws.ELEMENTS:
        return random_draws.uniform_matrix(key, salt, shape, CPU, slice(*block))
    p = torch.tensor(P)
    if kind == random_draws.FACTOR:
        return random_draws.factor(key, salt, p, shape, CPU)
    drawn = random_draws.uniform(key, salt, shape, CPU)
    return drawn >= p if kind == random_draws.KEPT else drawn


def run():
    """Print the largest difference of each draw, and whether it has more than one value."""
    for (name, kind), (of, (shape, block)) in itertools.product(KINDS.items(), DRAWS.items()):
        if (kind == random_draws.ELEMENTS) != bool(block):
            continue
        for key, salt in ((0x12345678, 5), (0xFEDCBA98, 0x9ABCDEF0), (torch.tensor(0xFEDCBA98), 0x7FFFFFFF)):
            found, right = filled(kind, key, salt, shape, block), wanted(kind, key, salt, shape, block)
            assert found.shape == right.shape and found.dtype == right.dtype
            line = {"kind": name, "draw": of, "error": (found.float() - right.float()).abs().max().item()}
            print(json.dumps({**line, "differ": len(found.unique())}), flush=True)


def heads():
    """Print the largest difference of the factors of heads, and how many differ between them."""
    for (samples, count), rescale, p in itertools.product(((1, 2), (300, 12), (7, 33)), (True, False), (0.0, P, 0.99)):
        for key, salt in ((0xFEDCBA98, 0x9ABCDEF0), (torch.tensor(0xFEDCBA98), 5)):
            given, number = (key, 0) if isinstance(key, torch.Tensor) else (None, key)
            out = torch.full((samples, count), torch.nan)
            found = triton_draws.draw_heads(given, number, salt, float(torch.tensor(p)), rescale, out)
            right = random_draws.head_factors(key, salt, torch.tensor(p), (samples, count), CPU, rescale)
            differ = len(found.unique())
            print(json.dumps({"p": p, "error": (found - right).abs().max().item(), "differ": differ}), flush=True)


def noise():
    """Print the largest difference of noise in each dtype, relative to the largest number."""
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), ((3, 700), (2, 33, 65))):
        amount = torch.rand(shape[0])
        found = triton_draws.draw_noise(None, 7, 5, amount, torch.full(shape, torch.nan, dtype=dtype))
        x = torch.empty(shape, dtype=dtype)
        right = random_draws.noise(7, 5, amount.view(-1, *[1] * (len(shape) - 1)), x).float()
        error = (found.float() - right).abs().max() / right.abs().max()
        print(json.dumps({"dtype": str(dtype), "error": error.item()}), flush=True)


def keys():
    """Print the keys of three passes by the kernel, and by the numbers of the host."""
    for seed, first in ((0xFEDCBA98, 0), (5, 3), (7, (1 << 32) - 1)):
        replays = torch.zeros((), dtype=torch.int64)
        found = [int(triton_draws.next_key(random_draws.mix(seed, 4), first, replays)) for _ in range(3)]
        right = [random_draws.mix(seed, 4, first + pass_) for pass_ in range(3)]
        print(json.dumps({"found": found, "right": right, "replays": int(replays)}), flush=True)


def compile_all():
    """Compile what draws of heads, columns and inputs launch."""
    for capability in (80, 90, 100):
        with compiled_instead_of_launched(capability) as made:
            for kind in (random_draws.UNIFORM, random_draws.NORMAL, random_draws.KEPT, random_draws.FACTOR):
                filled(kind, 7, 5, (16, 12, 1, 1024), [])
            filled(random_draws.ELEMENTS, torch.tensor(7), 5, (16, 12, 64, 64), [8, 16])
            triton_draws.draw_heads(None, 7, 5, P, True, torch.empty(16, 12))
            triton_draws.draw_noise(None, 7, 5, torch.ones(16), torch.empty(16, 1024, 768, dtype=torch.bfloat16))
            triton_draws.next_key(7, 3, torch.zeros((), dtype=torch.int64))
        for line in made:
            print(json.dumps({"capability": capability, **line}), flush=True)


if __name__ == "__main__":
    {"run": run, "heads": heads, "keys": keys, "noise": noise, "compile": compile_all}[sys.argv[1]]()
