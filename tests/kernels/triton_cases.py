"""Runs the Triton kernels, in a process of its own: under the interpreter against the textbook, or compiled for GPUs
that are not here.

TRITON_INTERPRET=1 python tests/kernels/triton_cases.py run       prints one JSON line per case: its largest errors
python tests/kernels/triton_cases.py compile                      prints one per launch: what it needs of a GPU
python tests/kernels/triton_cases.py launch                       prints one per kernel: its grid, and its device
"""

import contextlib
import itertools
import json
import sys

import torch

from headwise.attend.core.packed import Packed

CASES = {
    # name: (batch, heads, groups, queries, keys, size, size of values, mask, causal, dtype)
    "plain": (2, 2, 1, 20, 20, 32, 32, "none", False, "float32"),
    "causal": (1, 2, 1, 70, 70, 32, 32, "none", True, "float32"),
    "causal, fewer queries than keys": (1, 1, 1, 5, 40, 16, 16, "none", True, "float32"),
    "causal, more queries than keys": (1, 1, 1, 40, 5, 16, 16, "none", True, "float32"),
    "boolean mask": (2, 2, 1, 20, 33, 32, 32, "bool", False, "float32"),
    "a row without any key": (1, 2, 1, 20, 20, 32, 32, "empty", False, "float32"),
    "boolean mask and causal": (2, 1, 1, 40, 40, 32, 32, "padding", True, "float32"),
    "additive mask": (1, 2, 1, 20, 20, 32, 32, "additive", False, "float32"),
    "grouped heads": (2, 4, 2, 20, 20, 32, 32, "none", False, "float32"),
    "grouped heads, causal, padding": (1, 6, 3, 40, 40, 32, 32, "padding", True, "float32"),
    "a head size that is no power of two": (1, 2, 1, 20, 20, 24, 40, "none", False, "float32"),
    "head size 64": (1, 1, 1, 70, 70, 64, 64, "none", True, "float32"),
    "head size 128": (1, 1, 1, 40, 40, 128, 128, "bool", False, "float32"),
    "head size 256": (1, 1, 1, 40, 40, 256, 256, "none", True, "float32"),
    "fp16": (1, 2, 1, 40, 40, 32, 32, "padding", True, "float16"),
    "bf16": (1, 2, 1, 40, 40, 32, 32, "padding", True, "bfloat16"),
    "bf16, grouped, additive": (1, 4, 2, 20, 20, 64, 64, "additive", False, "bfloat16"),
    "head size 80, three queries' heads to a head of keys": (1, 6, 3, 67, 67, 80, 80, "padding", True, "float32"),
    "packed rows": (4, 2, 1, 33, 33, 32, 32, "sequences", True, "float32"),
    "packed rows, grouped": (4, 4, 2, 33, 33, 32, 32, "sequences", True, "float32"),
    "packed rows of an encoder": (4, 2, 1, 33, 33, 32, 32, "sequences", False, "float32"),
    "packed rows with a window": (4, 2, 1, 33, 33, 32, 32, "windows", False, "float32"),
    "packed rows, bf16": (4, 2, 1, 33, 33, 32, 32, "sequences", True, "bfloat16"),
    "rows of the lowest number": (1, 2, 1, 20, 20, 32, 32, "lowest", False, "float32"),
    "large logits": (1, 1, 1, 40, 40, 32, 32, "sharp", False, "float32"),
}


def inputs(batch, heads, groups, queries, keys, size, size_v, mask, causal, dtype):
    """Tensors with strides that are not those of a fresh tensor, as hosts give them."""
    g = torch.Generator().manual_seed(0)
    dtype = getattr(torch, dtype)

    def made(heads, rows, width):
        return torch.randn(batch, rows, heads, width, generator=g).transpose(1, 2).to(dtype)

    q, k, v = made(heads, queries, size), made(heads // groups, keys, size), made(heads // groups, keys, size_v)
    if mask == "sharp":
        q = q * 100
    given = None
    if mask in ("bool", "empty"):
        given = torch.rand(batch, 1, queries, keys, generator=g) > 0.4
        given[..., 0] = True
    if mask == "empty":
        given[:, :, 3] = False
    if mask == "padding":
        given = (torch.arange(keys) < keys - 3).view(1, 1, 1, keys)
    if mask in ("sequences", "windows"):
        # As the rows of a packed batch come to the readings: its sequences are samples, padded on the right.
        lengths = torch.tensor([33, 5, 1, 20])[:batch]
        starts = lengths.cumsum(0) - lengths
        packed = Packed(1, int(lengths.sum()), starts, lengths, int(lengths.max()))
        given = packed.mask(mask == "windows", 4 if mask == "windows" else None)
    if mask == "lowest":
        # As transformers masks all keys of a padded query.
        given = torch.zeros(1, 1, queries, keys).masked_fill(torch.arange(queries)[:, None] < 3, torch.finfo(dtype).min)
    if mask == "additive":
        given = torch.randn(1, heads, queries, keys, generator=g).to(dtype)
    return q, k, v, given, causal, size**-0.5


def textbook(q, k, v, mask, causal, scale):
    """The same from the whole matrix, in fp64, with autograd's gradients of a random sum of all four."""
    from test_row_statistics import textbook as whole

    share = q.shape[1] // k.shape[1]
    given = [x.double().detach().requires_grad_() for x in (q, k, v)]
    q, k, v = given[0], given[1].repeat_interleave(share, 1), given[2].repeat_interleave(share, 1)
    *outputs, empty = whole(q, k, v, mask if mask is None or mask.dtype == torch.bool else mask.double(), causal, scale)
    outputs[1] = outputs[1].masked_fill(empty, 0.0)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(outputs)]
    if mask is not None and mask.is_floating_point():
        # A query that sees no key does not count.
        blind = (mask <= torch.finfo(torch.float32).min).all(-1).expand(outputs[1].shape)
        weights = [w.masked_fill(blind.view(*blind.shape, *[1] * (w.dim() - 3)), 0.0) for w in weights]
    total = sum((w * x).sum() for w, x in zip(weights, outputs, strict=True))
    return outputs, weights, torch.autograd.grad(total, given)


def run(name):
    """Return the largest error of each output and gradient, over the largest wanted number."""
    from headwise.attend.attention import row_statistics, triton_rows

    given = inputs(*CASES[name])
    assert triton_rows.supports(*given[:3])
    wanted, weights, gradients = textbook(*given)
    found = triton_rows.forward(*given)
    saved = [*given[:3], *found]
    cotangents = tuple(w.to(x.dtype) for w, x in zip(weights, found, strict=True))
    made = triton_rows.backward(cotangents, row_statistics.levels(cotangents, saved), saved, *given[3:])
    names = ("output", "log-sum-exp", "entropy", "sum of squares", "dq", "dk", "dv")
    return {
        part: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)).item()
        for part, a, b in zip(names, (*found, *made), (*wanted, *gradients), strict=True)
    }


def compile_all():
    """Compile what forward and backward launch, for each GPU: print the shared memory, registers and spilled bytes."""
    from triton_process import compiled_instead_of_launched

    from headwise.attend.attention import triton_rows

    kinds = (
        ("bfloat16", 64, "none", True),
        ("bfloat16", 64, "none", False),
        ("bfloat16", 128, "none", True),
        ("bfloat16", 256, "none", True),
        ("float16", 32, "padding", True),
        ("float32", 64, "additive", False),
        ("float32", 256, "none", True),
    )
    for capability, (dtype, size, mask, causal) in itertools.product(map(int, sys.argv[2:] or (80, 90, 100)), kinds):
        q, k, v, *more = inputs(1, 4, 2, 512, 512, size, size, mask, causal, dtype)
        with compiled_instead_of_launched(capability) as made:
            out, lse, entropy, square = triton_rows.forward(q, k, v, *more)
            gradients = (torch.zeros_like(out), None, lse, square)
            triton_rows.backward(gradients, lse, [q, k, v, out, lse, entropy, square], *more)
        for line in made:
            print(json.dumps({"capability": capability, "case": f"{dtype} {size} {mask}", **line}), flush=True)


class Launched:
    """Stands in for a kernel: keeps the grid and the device that was current when it was launched."""

    current = None

    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        def launch(*given, **fixed):
            print(json.dumps({"kernel": self.name, "grid": grid, "device": Launched.current}), flush=True)

        return launch


@contextlib.contextmanager
def device_of(x):
    """Stands in for torch.cuda.device_of."""
    Launched.current = str(x.device)
    yield
    Launched.current = None


def launch():
    """Launch all kernels on as many heads as windows make of a batch."""
    from headwise.attend.attention import triton_rows

    torch.cuda.device_of = device_of
    for name in ("forward_kernel", "queries_kernel", "keys_kernel"):
        setattr(triton_rows, name, Launched(name))
    q, k, v = torch.zeros(3, 24_000, 3, 40, 16)
    found = triton_rows.forward(q, k, v, None, False, 1.0)
    triton_rows.backward((found[0], None, None, None), found[1], [q, k, v, *found], None, False, 1.0)


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch()
    elif sys.argv[1] == "run":
        for case in sys.argv[2:] or CASES:
            print(json.dumps({"case": case, **run(case)}), flush=True)
    else:
        compile_all()
