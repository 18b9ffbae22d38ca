"""Runs the Triton kernels of a reading's figures: interpreted beside the PyTorch form in fp64, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_figures_cases.py run    prints for each case the errors of its figures
python tests/kernels/triton_figures_cases.py compile                   prints for each launch what it needs
"""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

import torch
from triton_process import compiled_instead_of_launched

from headwise.health.statistics import Queries, Reading, RowFigures, figures_by_kernels

sys.path.append(str(Path(__file__).parents[1] / "statistics"))
from statistic_calls import reading

figures_by_kernels.kernels_run_on = lambda device: True
# calls that the kernels leave to the PyTorch form: soft-caps, sinks
OF_PYTORCH = ("soft capped", "with sinks", "with sinks and padding")
CALLS = (
    "plain", "causal", "padded", "padded float", "left padded", "left padded causal", "sliding", "grouped", "cross",
    "biased", "packed", "one key rows", "collapsed",
)  # fmt: skip


def made(batch, heads, groups, tokens, size, size_v, dtype, **more):
    """Return a reading whose tensors have strides that are not those of a fresh tensor."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, tokens, n, width, generator=g).transpose(1, 2).to(getattr(torch, dtype))
        for n, width in ((heads, size), (heads // groups, size), (heads // groups, size_v))
    )
    return Reading(q, k + 0.5, v + 1.0, **more)


MADE = {
    "longer than a tile, causal": lambda: made(1, 2, 1, 150, 32, 32, "float32", causal=True),
    "longer than a tile": lambda: made(1, 2, 1, 133, 32, 32, "float32"),
    "a head size that is no power of two, grouped": lambda: made(1, 6, 3, 67, 80, 40, "float32", causal=True),
    "text": lambda: made(2, 2, 1, 50, 16, 16, "float32", text=slice(40, 50)),
    "values alike": lambda: dataclasses.replace(
        made(1, 2, 1, 40, 16, 16, "bfloat16"), v=torch.ones(1, 2, 40, 16).bfloat16()
    ),
    "bf16": lambda: made(1, 2, 1, 150, 64, 64, "bfloat16", causal=True),
    "fp16": lambda: made(1, 2, 1, 150, 64, 64, "float16"),
}


def layer_before(given):
    """Return a layer whose maps differ from those of `given`, with one head more."""
    q, k, v = (torch.cat([x, x[:, :1].flip(2)], 1).flip(1) for x in (given.q, *by_head(given)))
    mask = given.mask if given.mask is None or given.mask.shape[1] == 1 else given.mask[:, :1]
    return dataclasses.replace(given, q=q * 0.5, k=k, v=v, mask=mask)


def by_head(given):
    return [x.repeat_interleave(given.heads // x.shape[1], 1) for x in (given.k, given.v)]


def errors(given, rows):
    """Return the largest error of each figure over its largest number, among the queries that count."""
    queries = Queries.of(given, rows, torch.Generator().manual_seed(1))
    needs = set(figures_by_kernels.FIGURES) - (set() if given.text else {"on_text"})
    before = layer_before(given)
    if rows is None and given.batch > 1:
        # as in a model whose layers are read one after another
        figures_by_kernels.by_kernels(before, Queries.of(before), {"entropy"})
        assert "lse" in before.kept
    if not given.self_attention:
        needs -= {"roughness", "descent", "distance"}
    found = figures_by_kernels.by_kernels(given, queries, needs, before)
    assert set(found) == needs, set(found) ^ needs
    tensors = ("q", "k", "v")
    exact, before = (
        dataclasses.replace(one, known_bound=math.inf, **{x: getattr(one, x).double() for x in tensors})
        for one in (given, before)
    )
    right = RowFigures(exact, needs, queries, before)
    result = {}
    for name in sorted(needs):
        want, have = getattr(right, name).double(), found[name].double()
        if name not in ("columns", "likeness", "crossing"):
            # a row with one key has no direction
            counts = (queries.valid > 0) & (queries.counts >= (2 if name == "descent" else 1))
            want, have = (torch.where(counts, x, 0.0) for x in (want, have))
        result[name] = ((want - have).abs().max() / want.abs().max().clamp(min=1e-6)).item()
    return result


def run(chosen):
    for name, rows in itertools.product(CALLS, (None, 9)):
        case = f"{name}, {rows or 'all'} queries"
        if not chosen or case in chosen:
            given = dataclasses.replace(reading(name), known_bound=1.0)
            print(json.dumps({"case": case, **errors(given, rows)}), flush=True)
    for name, build in MADE.items():
        if not chosen or name in chosen:
            print(json.dumps({"case": name, **errors(build(), None)}), flush=True)
    for name in OF_PYTORCH:
        given = dataclasses.replace(reading(name), known_bound=1.0)
        assert not figures_by_kernels.by_kernels(given, Queries.of(given), {"entropy"})


def compile_all():
    for capability in map(int, sys.argv[2:] or (80, 90, 100)):
        for size, dtype, causal in (
            (64, "bfloat16", True),
            (64, "bfloat16", False),
            (128, "bfloat16", True),
            (80, "float16", True),
            (64, "float32", True),
        ):
            given = made(1, 4, 2, 512, size, size, dtype, causal=causal)
            with compiled_instead_of_launched(capability) as launched:
                needs = set(figures_by_kernels.FIGURES) - {"on_text"}
                figures_by_kernels.by_kernels(given, Queries.of(given), needs, layer_before(given))
            for line in launched:
                case = f"{dtype} {size} {'causal' if causal else 'all'}"
                print(json.dumps({"capability": capability, "case": case, **line}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        run(sys.argv[2:])
