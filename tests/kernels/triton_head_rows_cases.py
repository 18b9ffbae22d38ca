"""Runs the Triton kernels of rows, means and pairs of heads: interpreted beside the PyTorch form in fp64, or compiled.

TRITON_INTERPRET=1 python tests/kernels/triton_head_rows_cases.py run    prints for each case its largest errors
TRITON_INTERPRET=1 python tests/kernels/triton_head_rows_cases.py second prints those of second derivatives
python tests/kernels/triton_head_rows_cases.py compile                   prints for each launch what it needs
"""

import itertools
import json
import math
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.attend.attention import exponential, gates, head_rows, low_rank_gates, means, pairs, wide_head

# (batch, heads, queries, size), whether rows of all heads lie beside each other in memory, dtype
SHAPES = {
    "odd": ((2, 3, 37, 24), True, "float32"),
    "one row": ((1, 2, 1, 16), False, "float32"),
    "more than a block": ((1, 4, 301, 64), True, "float32"),
    "head size 80": ((2, 4, 67, 80), True, "float32"),
    "head size 256": ((1, 2, 33, 256), False, "float32"),
    "bf16": ((2, 4, 133, 64), True, "bfloat16"),
    "fp16": ((2, 4, 70, 40), False, "float16"),
}


class Inputs:
    """Random tensors whose strides are those that hosts give, in the dtype of a case."""

    def __init__(self, shape, beside, dtype):
        self.shape, self.beside, self.dtype = shape, beside, getattr(torch, dtype)
        self.generator = torch.Generator().manual_seed(0)

    def rows(self, queries=None, heads=None):
        b, h, t, d = self.shape
        h, t = heads or h, queries or t
        if self.beside:
            # as one product gives queries, keys and values; what lies between must not be read
            made = torch.full((b, t, 3, h, d), float("nan"))
            made[:, :, 1] = torch.randn(b, t, h, d, generator=self.generator)
            return made[:, :, 1].transpose(1, 2).to(self.dtype)
        return torch.randn(b, h, t, d, generator=self.generator).to(self.dtype)

    def gains(self, count):
        return (1 + 0.3 * torch.randn(count, generator=self.generator)).to(self.dtype)


def cases():
    """Return for each operator: inputs, the PyTorch form, and the form by kernels."""
    of = head_rows

    def norm(kind, shared=1):
        def made(x):
            heads = x.shape[1]
            given = [x.rows(), x.rows(), x.gains(heads), x.gains(max(1, heads // shared))]

            def form(q, k, g, h):
                return tuple(of._normalised(y, a, 1e-6, kind == of.LAYER) for y, a in ((q, g), (k, h)))

            return given, form, lambda *t: of._Norm.apply(1e-6, kind, *t)

        return made

    def norm_of_other_keys(x):
        given = [x.rows(), x.rows(queries=x.shape[2] + 5), x.gains(x.shape[1]), x.gains(x.shape[1])]
        form = norm(of.RMS)(x)
        return given, form[1], form[2]

    def divided(gains):
        def made(x):
            given = [x.rows(), x.gains(gains or x.shape[1])]
            return given, of._divided, lambda *t: of._Norm.apply(0.0, of.DIVIDE, *t)[0]

        return made

    def own(gate, keyed):
        def made(x):
            v = x.rows()
            v[:, :, 0] = 0.0
            given = [x.rows(), v] + ([x.gains(x.shape[1])] if gate else [])
            number = torch.tensor(0.7)
            strength = (number, 0.0) if keyed else (None, 0.7)

            def form(o, v, gain=None):
                return of._without_own(o, v, gain, 0.7, gate == 2, 1e-12)

            def kernel(o, v, gain=None):
                return of._without_own_by_kernel(o, v, gain, *strength, gate, 1e-12)

            return given, form, kernel

        return made

    def mix(x):
        given = [x.rows(), x.rows(), x.gains(x.shape[1])]
        return given, lambda *t: of._mixed(*t, -2.0, 3.0), lambda *t: of._mixed_by_kernel(*t, -2.0, 3.0)

    def gate(per_row, two, factor):
        def made(x):
            numbers = [x.rows()[..., :1] if per_row else x.rows() for _ in range(1 + two)]
            given = [x.rows(), *numbers]

            def form(x, z, w=None):
                return gates._gated(x, z, w, factor)

            return given, form, lambda x, z, w=None: gates._Gated.apply(x, z, w, factor)

        return made

    def low_rank(sources, biased, rank, factor):
        def made(x):
            batch, heads, queries, size = x.shape
            shapes = [(batch, heads, queries, rank)] * sources + [(heads, rank, size)] * sources
            inner_and_up = [3 * (x.gains(math.prod(shape)) - 1).view(shape) for shape in shapes]
            bias = x.gains(heads * size).view(heads, size) if biased else None
            given = [x.rows(), *inner_and_up, *([bias] if biased else [])]

            def form(*t):
                return low_rank_gates._form(factor, sources, *t, *([] if biased else [None]))

            def kernel(*t):
                return low_rank_gates._LowRank.apply(factor, sources, *t, *([] if biased else [None]))

            return given, form, kernel

        return made

    def with_inner(tokens):
        def made(x):
            rows = x.rows()
            rows = rows.transpose(1, 2).flatten(2) if tokens else rows
            shape = (6, rows.shape[2]) if tokens else (x.shape[1], 6, x.shape[3])
            given = [rows, (x.gains(math.prod(shape)) - 1).view(shape)]
            return given, low_rank_gates.with_inner, low_rank_gates._WithInner.apply

        return made

    def exponents(x):
        v = x.rows()
        m = v.amax(2, keepdim=True)
        # values beyond the largest that counts, and far below it
        v[:, :, 0, :3], v[:, :, -1, 3:6] = 50.0, -200.0
        low, high = (-9.7, 9.7) if x.dtype == torch.float16 else (-87.3, 0.0)

        def form(v):
            return exponential._exponential(v, m.to(v.dtype), low, high)

        return [v], form, lambda v: exponential._exponential_by_kernel(v, m, low, high)

    def logarithm(x):
        o = x.rows().abs() + 0.1
        o[:, :, 0] = 0.0
        m = 3 * x.rows()[:, :, :1]
        return [o], lambda o: exponential._logarithm(o, m, 2.5), lambda o: exponential._logarithm_by_kernel(o, m, 2.5)

    def moved(kind, causal, more=0, same=False):
        def made(x):
            given = [x.rows(), x.rows(queries=x.shape[2] + more)][: 1 if same else 2]
            given += [x.gains(x.shape[1 if kind == means.HEADS else 3]) for _ in range(kind)]

            def form(o, v, *gains):
                return means.form(o, v, 0.3, kind, causal, *gains)

            def kernel(o, v, *gains):
                return means._Moved.apply(o, v, 0.3, kind, causal, *gains)[0]

            if same:
                return given, lambda o, *g: form(o, None, *g), lambda o, *g: kernel(o, None, *g)
            return given, form, kernel

        return made

    def moved_by_the_device(x):
        given = [x.rows(), x.rows()]
        share = torch.tensor(0.3)

        def kernel(o, v):
            return means._Moved.apply(o, v, 0.0, means.SHARE, True, share)[0]

        return given, lambda o, v: means.form(o, v, 0.3, means.SHARE, True), kernel

    def difference(per_row):
        def made(x):
            b, h, t, _ = x.shape
            factor = (
                torch.rand(b, t, h // 2, 1, generator=x.generator).transpose(1, 2) if per_row else torch.tensor(0.6)
            )
            return [x.rows(), x.rows(), factor], pairs._difference, pairs._difference_by_kernel

        return made

    def pair_norm(x):
        given = [x.rows(), x.gains(2 * x.shape[3])]
        return given, lambda *t: pairs._pair_norm(*t, 0.8, 1e-5), lambda *t: pairs._pair_norm_by_kernel(*t, 0.8, 1e-5)

    def agreement(x):
        rows = x.rows()
        if x.dtype != torch.float16:
            # a gradient beyond its range
            rows[:, 0, 0] = 0.0
        return [rows], lambda t: (t, pairs.agreement_of(t)), pairs._Agreement.apply

    def similar(causal, masked, entries):
        def made(x):
            rows = [x.rows()[:, 0], x.rows()[:, 0]]
            b, t, _ = rows[0].shape
            allowed = torch.rand(b, t, t, generator=x.generator) > 0.4 if masked else None
            if masked:
                allowed[:, 0] = False

            def form(unit, values):
                seen = torch.ones(t, t, dtype=torch.bool).tril() if causal else allowed
                weights = wide_head._softmax(
                    unit @ unit.mT, 0, 0.02, False, None if seen is None else seen.expand(b, t, t)
                )
                return weights @ values

            def kernel(unit, values):
                wide_head.ENTRIES = entries
                return wide_head._Similar.apply(unit, values, 0.02, causal, allowed)

            return rows, form, kernel

        return made

    return {
        "gates": gate(False, False, 1.0),
        "gates of two sources": gate(False, True, 2.0),
        "one gate for each row": gate(True, False, 2.0),
        "one gate for each row of two sources": gate(True, True, 1.0),
        "gates of low rank": low_rank(1, False, 5, 2.0),
        "gates of low rank of two sources": low_rank(2, True, 16, 1.0),
        "rows and their inner ones": with_inner(False),
        "tokens and their inner ones": with_inner(True),
        "exponentials": exponents,
        "logarithms": logarithm,
        "tokens like it": similar(False, False, 1 << 24),
        "earlier tokens like it, in blocks": similar(True, False, 1 << 11),
        "allowed tokens like it, in blocks": similar(False, True, 1 << 11),
        "difference": difference(False),
        "difference by row": difference(True),
        "norm of pairs": pair_norm,
        "agreement of heads": agreement,
        "towards the running mean": moved(means.SHARE, True),
        "towards the running mean, on the device": moved_by_the_device,
        "from the running mean": moved(means.HEADS, True),
        "towards the mean of other keys": moved(means.SHARE, False, 130),
        "from the mean": moved(means.HEADS, False),
        "by channel": moved(means.CHANNELS, False, same=True),
        "towards their mean": moved(means.SHARE, False, same=True),
        "from their mean": moved(means.HEADS, False, same=True),
        "rms": norm(of.RMS),
        "rms, one gain for two heads": norm(of.RMS, 2),
        "layer norm": norm(of.LAYER),
        "queries and other keys": norm_of_other_keys,
        "divided by head": divided(0),
        "divided by one number": divided(1),
        "without its own value": own(0, False),
        "without its own value, by a gain": own(1, True),
        "without its own value, by a tanh": own(2, False),
        "mixed": mix,
    }


def as_tuple(x):
    return (x,) if isinstance(x, torch.Tensor) else tuple(x)


def errors(made, x):
    """Return the largest error of the results and of each gradient, over the largest number wanted."""
    given, form, kernel = made(x)
    wide = [t.detach().double().requires_grad_() for t in given]
    given = [t.detach().requires_grad_() for t in given]
    wanted, found = as_tuple(form(*wide)), as_tuple(kernel(*given))
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(100 + i)) for i, t in enumerate(wanted)]
    right = torch.autograd.grad(wanted, wide, [w.double() for w in weights])
    made = torch.autograd.grad(found, given, [w.to(t.dtype) for w, t in zip(weights, found, strict=True)])
    for a, b in zip((*found, *made), (*found, *given), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)).item()
        for a, b in zip((*found, *made), (*wanted, *right), strict=True)
    ]


def second(made, x):
    """Return the largest error of second derivatives, which come from the PyTorch form."""
    given, form, kernel = made(x)
    found = []
    for how, kind in ((form, torch.float64), (kernel, given[0].dtype)):
        # vectors of length 0 have no second derivative
        of = [t.detach().masked_fill(t == 0, 0.5).to(kind).requires_grad_() for t in given]
        # weighted, as the sum of squares of a normalised row is constant
        results = [t.square() * torch.arange(t.numel()).view(t.shape).cos() for t in as_tuple(how(*of))]
        first = torch.autograd.grad(results, of, [torch.ones_like(t) for t in results], create_graph=True)
        found.append(torch.autograd.grad([t.square() for t in first], of, [torch.ones_like(t) for t in first]))
    return max(
        ((b.double() - a).abs().max() / a.abs().max().clamp(min=1e-3)).item() for a, b in zip(*found, strict=True)
    )


def run_second():
    for name, made in cases().items():
        print(json.dumps({"case": name, "error": second(made, Inputs((1, 2, 19, 16), True, "float32"))}), flush=True)


def run():
    for (name, made), (of, shape) in itertools.product(cases().items(), SHAPES.items()):
        if name in sys.argv[2:] or len(sys.argv) == 2:
            if ("two heads" in name or "difference" in name or "pairs" in name) and shape[0][1] % 2:
                continue
            print(json.dumps({"case": name, "of": of, "errors": errors(made, Inputs(*shape))}), flush=True)


def compile_all():
    """Compile what forward and backward of each operator launch."""
    for capability in map(int, sys.argv[2:] or (80, 90, 100)):
        for size, dtype in ((64, "bfloat16"), (80, "float16"), (256, "float32")):
            x = Inputs((2, 4, 256, size), True, dtype)
            for name, case in cases().items():
                if "low rank" in name and size > low_rank_gates.LARGEST:
                    continue
                given, _, kernel = case(x)
                given = [t.detach().requires_grad_() for t in given]
                with compiled_instead_of_launched(capability) as made:
                    found = as_tuple(kernel(*given))
                    torch.autograd.grad(found, given, [torch.ones_like(t) for t in found])
                for line in made:
                    print(json.dumps({"capability": capability, "case": name, "size": size, **line}), flush=True)


if __name__ == "__main__":
    {"run": run, "second": run_second, "compile": compile_all}[sys.argv[1]]()
