"""Runs the Triton kernels of the figures of tokens: interpreted beside their definitions in fp64, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_token_cases.py run      prints for each case the errors of its figures
python tests/kernels/triton_token_cases.py compile                     prints for each launch what it needs
"""

import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.health.statistics import Reading, figures_by_kernels, read

figures_by_kernels.kernels_run_on = lambda device: True
LENGTHS = torch.tensor([50, 1, 0, 33])


def tokens(batch, count, size, dtype="float32", shift=1.0):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(batch, count, size, generator=g) + shift).to(getattr(torch, dtype))


def padded(x):
    """Return the tokens with padding that holds anything, and which are real."""
    real = torch.arange(x.shape[1]) < LENGTHS[:, None]
    return x.masked_fill(~real[..., None], torch.nan), real


def alike(x):
    """Return tokens that differ in the last digits only."""
    return x[:, :1] * (1 + 1e-4 * tokens(*x.shape))


def broken(x):
    x[0, 3, 5], x[1, 7, 9] = torch.nan, torch.inf
    return x


CASES = {
    # name: tokens (B, T, C), and which are real
    "more than one tile and part": lambda: (tokens(3, 333, 48), None),
    "one token": lambda: (tokens(2, 1, 16), None),
    "wide": lambda: (tokens(1, 5, 5000), None),
    "padded": lambda: padded(tokens(4, 50, 24)),
    "padded bf16": lambda: padded(tokens(4, 50, 24, "bfloat16")),
    "bf16": lambda: (tokens(2, 77, 96, "bfloat16"), None),
    "fp16": lambda: (tokens(2, 77, 96, "float16"), None),
    "about zero": lambda: (tokens(2, 77, 32, shift=0.0), None),
    "alike": lambda: (alike(tokens(2, 77, 32)), None),
    "the same": lambda: (tokens(2, 1, 32).expand(-1, 40, -1), None),
    "huge": lambda: (tokens(2, 40, 32) * 1e37, None),
    "tiny": lambda: (tokens(2, 40, 32) * 1e-37, None),
    "zeros": lambda: (torch.zeros(2, 40, 32), None),
    "some zeros": lambda: (tokens(2, 40, 32) * (torch.arange(40) % 3 > 0)[:, None], None),
    "strides": lambda: (tokens(2, 32, 60).transpose(1, 2)[:, ::2], None),
    "a nan and an infinity": lambda: (broken(tokens(3, 40, 32)), None),
}


def textbook(x, real):
    """Return the three figures of one sample (T, C) from all pairs of tokens, nan where there is none."""
    x = x.double() if real is None else x.double()[real]
    lengths = x.norm(dim=-1, keepdim=True)
    unit = x / torch.where(lengths == 0, 1.0, lengths)
    cosines = unit @ unit.T
    pairs = len(x) * (len(x) - 1)
    mean = cosines.fill_diagonal_(0.0).sum() / pairs if pairs else torch.tensor(torch.nan)
    share = (x - x.mean(0)).norm() / x.norm() if len(x) else torch.tensor(torch.nan)
    largest = x.abs().amax() if len(x) else torch.tensor(0.0)
    return torch.stack([mean.double(), share.double(), largest.double()])


def run():
    for name, make in CASES.items():
        x, real = make()
        right = torch.stack([textbook(one, None if real is None else real[b]) for b, one in enumerate(x)], 1)
        q = torch.zeros(len(x), 1, x.shape[1], 4)
        reading = Reading(q, q, q, hidden=x, real_queries=real)
        found = figures_by_kernels.of_tokens(reading, reading.hidden)
        # Statistics take the kernels' figures, and leave samples without one out.
        names = ["token_cosine", "high_frequency"]
        for at, tally in enumerate(read(reading, names).values()):
            assert torch.equal(tally.total, found[at][:, None].nansum(0)), name
            assert int(tally.weight) == int((~right[at].isnan()).sum()), name
        assert list(reading.kept) == [id(reading.hidden)], name
        line = {"case": name}
        for figure, have, want in zip(("cosine", "share", "largest"), found, right, strict=True):
            assert torch.equal(have.isnan(), want.isnan()), (name, figure, have, want)
            error = torch.where(have == want, 0.0, (have - want).abs()).nan_to_num(0.0)
            line[figure] = (error / (want.abs().clamp(1e-45, 1e38) if figure == "largest" else 1.0)).max().item()
        print(json.dumps(line), flush=True)
    x = tokens(2, 8, 16)
    reading = Reading(x[:, None], x[:, None], x[:, None])
    for left in (x.double(), tokens(1, 2, 8200), x[:, :0]):
        assert figures_by_kernels.of_tokens(reading, left) is None


def compile_all():
    for capability in map(int, sys.argv[2:] or (80, 90, 100)):
        for size, dtype, real in (
            (768, "bfloat16", False),
            (768, "bfloat16", True),
            (100, "float16", False),
            (4096, "bfloat16", False),
            (8192, "float32", True),
        ):
            x = torch.zeros(16, 512, size, dtype=getattr(torch, dtype))
            with compiled_instead_of_launched(capability) as launched:
                figures_by_kernels.read_tokens(x, torch.ones(16, 512, dtype=torch.bool) if real else None)
            for line in launched:
                print(json.dumps({"capability": capability, "case": f"{dtype} {size}", **line}), flush=True)


if __name__ == "__main__":
    compile_all() if sys.argv[1] == "compile" else run()
