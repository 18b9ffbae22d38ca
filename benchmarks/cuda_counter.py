"""Counts what a training step does on a fake CUDA device; runs in a process that `cuda_costs.py` starts.

Each line of standard input is `model<tab>method`, each line of standard output the counts of its two layers as JSON;
for "plain" also the least time of a step of the whole model.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]
import cuda_attention  # noqa: E402, F401  (before headwise)
from fake_cuda import FakeCuda, believe_in_cuda  # noqa: E402
from training_models import LAYERS, MODELS  # noqa: E402

import headwise  # noqa: E402
from headwise.attend.attention.strips import STRIP, rows_of_a_strip, strips  # noqa: E402
from headwise.attend.core.method import REGISTRY  # noqa: E402
from headwise.attend.projections.chebyshev import BLOCK, steps_of  # noqa: E402
from headwise.health.statistics import figures_by_kernels  # noqa: E402

COUNTED_LAYERS = 2
# the least time of all operators, and that by one of the three bounds alone
TIMES = ("seconds", "by_kernels", "by_bytes", "by_products")
# An H100: bytes a second that a copy reaches, the shortest kernel in seconds, and products a second by dtype.
BANDWIDTH, SHORTEST, ATTENTION = 2.85e12, 2e-6, 500e12
RATES = {torch.bfloat16: 600e12, torch.float16: 600e12, torch.float32: 55e12, torch.float64: 60e12}
# operators that allocate or describe, without a kernel
WITHOUT_KERNEL = {
    "alias", "detach", "device", "empty", "empty_like", "empty_strided", "is_pinned", "lift_fresh",
    "_local_scalar_dense", "new_empty", "new_empty_strided", "record_stream", "_reshape_alias", "resize_", "set_",
    "_unsafe_view",
}  # fmt: skip
# The kernels and products of our own operators, where they are more than one kernel: kernels, matrix products of
# (B, H, T, N) with a head, and the share of attention's rate that their code reaches.
OWN = {
    "attend_rows": (1, 2, 0.45),
    "attend_rows_backward": (9, 7, 0.45),
    # torch's flash attention, and in backward a kernel before it
    "attend_with_lse": (1, 2, 1.0),
    "attend_with_lse_backward": (2, 5, 1.0),
    # torch's flash attention, a kernel after it, and in backward one before it and a sum
    "attend_with_sinks": (2, 2, 1.0),
    "attend_with_sinks_backward": (3, 5, 1.0),
    "attend_dropped": (1, 2, 0.45),
    "attend_dropped_backward": (6, 7, 0.45),
    # Rows by queries and by keys; with the maps of the layer before, products of twice as many heads.
    "read_rows": (3, 4, 0.35),
    "read_columns": (1, 1, 0.35),
    "read_products": (2, 3, 0.25),
    "attend_edited": (1, 2, 0.45),
    "attend_edited_backward": (2, 7, 0.45),
}
# How often they read or write as many bytes as the output has before or after attention, which does not overlap.
PASSES = {"attend_with_lse_backward": 4, "attend_with_sinks": 2, "attend_with_sinks_backward": 2}
# of queries in the kernels of the overlap of heads
OVERLAP_BLOCK = 128
# SpectralCap's kernel has one program for each matrix, on one of so many processors: bytes a second that one reads from
# L2, products a second in TF32, and seconds for the small matrices of a cut (180 products).
PROCESSORS, L2_BYTES, TF32, SMALL = 132, 75e9, 1.7e12, 180e-6
# rows of a tile of a matrix, for each of which the block is read
CUT_ROWS = 64
# The share of attention's rate at which products of stored weights run: they compute nothing else.
STORED = 0.7
# Methods with kernels that serve all layers at once. A reading reads the weights of all layers together, and most
# layers have one before them.
GROUPED = (
    "watch",
    "NuclearDecay",
    "ProductDecay",
    "QKRates",
    "SigmaReparam",
    "SpectralCap",
    "SpectralNorm",
    "WeightNorm",
)
# Kernels of our other operators, where they are more than one.
LAUNCHES = {
    "norm_rows_backward": 2,
    "mix_rows_backward": 2,
    # of two sources and a bias: their parts are summed, and rounded
    "low_rank_gate_backward": 7,
    "pair_difference_backward": 2,
    "pair_norm_rows_backward": 3,
    "attend_linear_backward": 2,
    "moved_rows": 2,
    "moved_rows_backward": 3,
    "spectral_scale": 2,
    "spectral_slopes": 2,
    "spectral_iteration": 3,
    "read_tokens": 2,
    # of numbers in half precision: counts set to 0, two passes, and what they leave
    "medians": 4,
}
# how often an operator reads its tensors, where it is not once
READS = {"medians": 2}
# where the backward operators have the list of saved tensors
SAVED = {
    "attend_rows_backward": 1,
    "attend_with_lse_backward": 1,
    "attend_with_sinks_backward": 1,
    "attend_dropped_backward": 1,
    "attend_edited_backward": 1,
}
# where other operators say whether they are causal; the default is after q, k, v and a mask
CAUSAL_AT = {
    "attend_with_sinks": 5,
    "attend_with_sinks_backward": 3,
    "attend_edited": 5,
    "read_rows": 9,
    "read_columns": 8,
    "read_products": 10,
}


class Counter(FakeCuda):
    """Notes every operator: its kernels, bytes and least time, and tensors of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.kernels = self.bytes = self.flops = self.on_cpu = self.largest = 0
        self.seconds = self.by_kernels = self.by_bytes = self.by_products = 0.0
        self.waits.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not any(x.device.type == "cuda" for x in (*inputs, *outputs)):
            self.on_cpu += 1
            return out
        name = func._schema.name.split("::")[-1]
        if func.is_view or name in WITHOUT_KERNEL:
            return out
        moved = sum(_bytes(x) for x in {id(x): x for x in inputs}.values() if x.device.type == "cuda")
        moved += sum(_bytes(x) for x in outputs if not any(x is y for y in inputs) or name.endswith("_"))
        moved *= READS.get(name, 1)
        if name == "gather":
            # The rows that are not asked for are not read.
            moved = min(moved, _bytes(args[2]) + 2 * _bytes(outputs[0]))
        if name in ("mix_heads", "mix_heads_backward"):
            self._add(_mixing(name, args, outputs))
            return out
        if name == "head_overlap" and (launches := _stored_overlap(args[0], args[1], args[6], args[8])):
            self._add(launches)
            return out
        flops, rate = _products(name, args, inputs, outputs)
        apart = PASSES[name] * _bytes(outputs[0]) if name in PASSES else 0
        # The values, and the gradient, are read for sums of chunks first.
        if name == "moved_rows_backward" or (name == "moved_rows" and (args[5] or args[0] is args[1])):
            moved += _bytes(args[0])
        # So are stacked weights, or the gradient of them.
        if name.startswith("spectral_"):
            moved += _bytes(inputs[0])
        # Parts of sums over tokens are written and read.
        if name == "read_tokens":
            batch, tokens, size = args[0].shape
            moved += 2 * batch * figures_by_kernels.token_parts(batch, tokens) * size * (8 + 4)
        # Rows of weights, and their gradients, are read for sums first.
        if name in ("scaled_rows", "row_slopes"):
            moved += _bytes(inputs[0]) * (2 if name == "row_slopes" else 1)
        kernels = OWN[name][0] if name in OWN else LAUNCHES.get(name, 1)
        if name == "head_overlap":
            kernels, flops, rate, during, apart, strip = _overlap(args[0], args[1], args[6], args[8])
            moved, self.largest = moved + during, max(self.largest, strip)
        if name == "cut_singular_values":
            # Their bytes are read from L2.
            moved, flops, seconds = _cuts(inputs)
            self._take(kernels, 0, seconds)
        else:
            self._take(kernels, moved, flops / rate, apart)
        self.kernels += kernels
        self.bytes += moved
        self.flops += flops
        self.largest = max(self.largest, *(x.numel() * x.element_size() for x in (*inputs, *outputs)))
        self.bytes += apart
        return out

    def _take(self, kernels: int, moved: float, products: float, apart: float = 0) -> None:
        """Add the least time of kernels: the largest of theirs, of their bytes and, in seconds, of their products.

        Other bytes are moved `apart`, before or after.
        """
        alone = kernels * SHORTEST, moved / BANDWIDTH, products
        self.by_kernels, self.by_products = self.by_kernels + alone[0], self.by_products + alone[2]
        self.by_bytes += alone[1] + apart / BANDWIDTH
        self.seconds += max(alone) + apart / BANDWIDTH

    def _add(self, launches: list[tuple[int, float, float, float]]) -> None:
        """Add kernels that follow each other: of each its launches, bytes, products and their rate."""
        for kernels, moved, flops, rate in launches:
            self.kernels += kernels
            self.bytes += int(moved)
            self.flops += flops
            self._take(kernels, moved, flops / rate)
        self.largest = max(self.largest, STRIP)


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor; expanded dimensions are read once."""
    return math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step) * x.element_size()


def _products(name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[float, float]:
    """Return the floating-point operations of matrix products and the rate at which they run."""
    rate = RATES.get(outputs[0].dtype, RATES[torch.float32]) if outputs else RATES[torch.float32]
    if name in ("mm", "addmm", "bmm", "baddbmm", "baddbmm_"):
        a, b = inputs[-2:]
        # The factors decide, as a product of them may have a wider dtype.
        return 2 * a.numel() * b.shape[-1], RATES.get(a.dtype, rate)
    if name == "convolution":
        return 2 * outputs[0].numel() * inputs[1][0].numel(), rate
    if name == "convolution_backward":
        return 4 * inputs[0].numel() * inputs[2][0].numel(), rate
    if name in ("attention", "attention_backward"):
        back = name == "attention_backward"
        q, k, v = inputs[1:4] if back else inputs[:3]
        slow = args[6 if back else 3] is not None or q.shape[-1] != v.shape[-1]
        size = _tile(q.shape[-1]) + _tile(v.shape[-1])
        flops = (5 if back else 2) * q[..., 0].numel() * k.shape[2] * size
        # A mask, or values of another size, run the memory-efficient kernel, at about half the rate.
        return flops * (0.5 if args[-1] else 1), ATTENTION * (0.55 if slow else 1)
    if name.startswith("attend_linear"):
        # Of each token with the sum over the others, and with a chunk of 64; at half the rate, in TF32.
        q, v = (inputs[1], inputs[3]) if name.endswith("backward") else (inputs[0], inputs[2])
        states, chunks = (5, 4) if name.endswith("backward") else (2, 1)
        chunks = chunks if args[-1] else 0
        size, size_v = q.shape[-1], v.shape[-1]
        return 2 * q[..., 0].numel() * (states * size * size_v + chunks * 64 * (size + size_v)), 0.5 * ATTENTION * 0.45
    if name in OWN:
        _, count, share = OWN[name]
        place = SAVED.get(name)
        q, k, v = (inputs if place is None else args[place])[:3]
        if name.startswith("read_"):
            v = k
        causal = args[CAUSAL_AT.get(name, 4 if place is None else place + 2)]
        return count * q[..., 0].numel() * k.shape[2] * (q.shape[-1] + v.shape[-1]) * (
            0.5 if causal else 1
        ), ATTENTION * share
    return 0, rate


def _mixing(name: str, args: Any, outputs: list[Tensor]) -> list[tuple[int, float, float, float]]:
    """Return what each kernel launches, moves and multiplies that mixes weights over heads, in strips."""
    back = name.endswith("backward")
    q, k, v = args[1][:3] if back else args[:3]
    causal, norm = (args[9], args[6]) if back else (args[8], args[11] is not None)
    (batch, heads, queries, size), keys = q.shape, k.shape[2]
    number = sum(1 for _ in strips(batch, heads, queries, keys, q.element_size()))
    # In causal calls the rows of 16 queries end together.
    entries = q[..., 0].numel() * keys * ((1 + 16 / keys) / 2 if causal else 1)
    strip, rows = 2 * entries, sum(_bytes(x) for x in (q, k))
    # Products with heads run as those of attention's kernels; those over heads, of 16 at least, in TF32.
    of_heads, rate = 2 * entries * size, ATTENTION * 0.45
    over_heads, tf32 = 2 * entries * max(16, heads), ATTENTION * 0.45 / 2
    small, once = (1, 0.0, 0.0, rate), _bytes(v)
    if back:
        found = [
            (number, 2 * strip + rows + 2 * once, 2 * of_heads, rate),
            # Weights and products are read twice, the second time from the cache.
            (number, 4 * strip, 5 * over_heads, tf32),
            (number, strip + rows, of_heads, rate),
            (number, strip + rows, of_heads, rate),
            (number, strip + 2 * once, of_heads, rate),
            # parts of the gradient of mix
            small,
            small,
        ]
        return [*found, (1, 3 * once, 0.0, rate), small, small] if norm else found
    total = once if norm and causal else 0
    found = [
        (number, strip + rows, of_heads, rate),
        (number, 2 * strip, over_heads, tf32),
        (number, strip + 2 * once + total, of_heads * (2 if total else 1), rate),
    ]
    # the sum of all values, figures of rows, the norm, and its factors of the output
    return (
        [*found, (0 if causal else 2, once - total, 0.0, rate), small, small, (1, 2 * once + total, 0.0, rate)]
        if norm
        else found
    )


def _stored_overlap(q: Tensor, k: Tensor, causal: bool, slopes: bool) -> list[tuple[int, float, float, float]]:
    """Return what each kernel launches, moves and multiplies of the overlap of heads, whose weights are stored; nothing
    where those of one sample are too many."""
    (batch, heads, queries, size), keys = q.shape, k.shape[2]
    found = list(strips(batch, heads, queries, keys, q.element_size()))
    if found[0][3] < queries:
        return []
    number, rate = len(found), ATTENTION * 0.45
    entries = q[..., 0].numel() * keys * ((1 + 16 / keys) / 2 if causal else 1)
    strip, rows, of_heads = 2 * entries, _bytes(q) + _bytes(k), 2 * entries * size
    # Of each query with each other over all keys that both see.
    products, whole = 2 * q[..., 0].numel() * queries * keys / (3 if causal else 1), ATTENTION * STORED
    grams, sums = 2 * q[..., 0].numel() * queries, 4 * batch * queries * queries
    launches = [
        (number, strip + rows, of_heads, rate),
        (number, strip + grams + sums, products, whole),
        # Gram matrices become those of the other heads.
        (number, 2 * grams + sums, 0.0, rate),
        (2, 0.0, 0.0, rate),
    ]
    if slopes:
        launches += [
            (number, grams + 2 * strip + rows, products + of_heads * rate / whole, whole),
            (number, strip + 3 * rows / 2, of_heads, rate),
            (1, 3 * rows / 2, 0.0, rate),
        ]
    return launches


def _overlap(q: Tensor, k: Tensor, causal: bool, slopes: bool) -> tuple[int, float, float, int, int, int]:
    """Return the kernels of the overlap of heads, their products and rate, the bytes of strips that are moved during
    these and apart from them, and the bytes of one strip."""
    batch, heads, queries, size = q.shape
    keys, rows = k.shape[2], rows_of_a_strip(batch * heads, max(queries, k.shape[2]), queries, 2)
    # Of each query with each other over all keys that both see; blocks of 128 recompute the weights of both sides, and
    # for the gradients those of one.
    products = q[..., 0].numel() * queries * keys / (3 if causal else 1)
    each = 2 + 4 * size / OVERLAP_BLOCK + (2 + 2 * size / OVERLAP_BLOCK if slopes else 0)
    # Gram matrices are written, then read and written, then read; sums over heads, in fp32, are written and read; the
    # gradients of logits, half of them under causality, are written and read.
    grams, sums = 2 * q[..., 0].numel() * queries, 4 * batch * queries * queries
    logits = int(2 * q[..., 0].numel() * keys * (0.5 if causal else 1)) if slopes else 0
    during = grams + sums + (grams + logits if slopes else 0)
    strip = 2 * batch * heads * rows * max(queries, keys)
    kernels = (4 if slopes else 2) * -(-queries // rows) + 2
    return kernels, products * each, ATTENTION * 0.45, during, 2 * grams + sums + logits, strip


def _cuts(matrices: list[Tensor]) -> tuple[int, float, float]:
    """Return the bytes, products and seconds of a step in which each matrix is cut once.

    A program filters a block twice, for what is far below and for what is not, and then cuts.
    """
    moved, flops, each = 0, 0.0, []
    for x in matrices:
        quick, steps, *_ = steps_of(x.shape[1])
        passes = 2 * (quick + steps)
        # of half precision: copied, multiplied and cut in fp32, and copied back
        cut = x.numel() * (12 if x.dtype == torch.float32 else 24)
        bytes_ = passes * (_bytes(x) + 4 * x.numel() * BLOCK // CUT_ROWS) + cut
        products = 2 * x.numel() * BLOCK * (passes + 3 * 3)
        moved, flops = moved + bytes_, flops + products
        each.append(max(bytes_ / L2_BYTES, products / TF32) + SMALL)
    # The programs of a launch run at the same time, as far as there are processors.
    return moved, flops, max(max(each), sum(each) / PROCESSORS, SHORTEST)


def _tile(size: int) -> int:
    return next(tile for tile in (32, 64, 96, 128, 192, 256, size) if tile >= size)


def counted(net: nn.Module, model: str, fit: Callable[[nn.Module, Any], Any] | None) -> dict[str, Any]:
    """Return the counts of the second training step of a network with a method, a watch or nothing."""
    training = MODELS[model]
    handle = None if fit is None else fit(net, training.example())
    cuda = Counter()
    regularized = isinstance(handle, headwise.Regularized)
    with cuda:
        net.to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        inputs = [
            x.to("cuda", torch.bfloat16 if x.is_floating_point() else None) for x in training.batch(training.size)
        ]
    kernels: dict[str, int] = {}
    total: dict[str, Any] = {}
    for _ in range(2):
        total = dict.fromkeys(("bytes", "flops", "on_cpu", "largest", "waits"), 0) | dict.fromkeys(TIMES, 0.0)

        def ended(phase: str, total: dict[str, Any] = total) -> None:
            kernels[phase] = cuda.kernels
            for name in ("bytes", "flops", "on_cpu", *TIMES):
                total[name] += getattr(cuda, name)
            total["largest"] = max(total["largest"], cuda.largest)
            total["waits"] += len(cuda.waits)
            cuda.clear()

        cuda.clear()
        with cuda:
            loss = net(*inputs)
            if regularized:
                loss = loss + handle.loss()
        ended("forward")
        with cuda:
            loss.backward()
        ended("backward")
        with cuda:
            optimizer.step()
            optimizer.zero_grad()
        ended("optimizer")
        if handle is not None:
            with cuda:
                handle.after_step() if regularized else handle.step()
        ended("after")
    return {**kernels, **total}


def named(method: str) -> Callable[[nn.Module, Any], Any] | None:
    """Return what fits a method: "plain", "watch", or an expression such as "DropKey(unit='column')"."""
    if method == "plain":
        return None
    if method == "watch":
        return lambda net, _: headwise.watch(net, every=1, on_alert=None)
    made = eval(method, {}, dict(REGISTRY))
    return lambda net, example: headwise.regularize(net, made, example=example)


def of_model(model: str, method: str) -> dict[str, Any]:
    """Return the counts of two layers as they are in a whole model, some of whose kernels serve all layers."""
    fit = named(method)
    two = counted(MODELS[model].layers(COUNTED_LAYERS), model, fit)
    if method.partition("(")[0] not in GROUPED:
        return two
    one, plain = counted(MODELS[model].layers(1), model, fit), counted(MODELS[model].layers(1), model, None)
    two_plain = counted(MODELS[model].layers(COUNTED_LAYERS), model, None)
    for name in set(two) - {"largest"}:
        first, both = one[name] - plain[name], two[name] - two_plain[name]
        whole = first + (LAYERS - 1) * (both - first)
        two[name] = two_plain[name] + whole * COUNTED_LAYERS / LAYERS
    return two


def main() -> None:
    warnings.simplefilter("ignore")
    believe_in_cuda()
    # Readings by kernels, which are operators here, whether Triton is installed or not.
    figures_by_kernels.kernels_run_on = lambda device: device.type == "cuda"
    for line in sys.stdin:
        model, method = line.rstrip("\n").split("\t")
        try:
            counts = of_model(model, method)
            if method == "plain":
                one, two = (counted(MODELS[model].whole(layers), model, None)["seconds"] for layers in (1, 2))
                counts["whole"] = one + (LAYERS - 1) * (two - one)
        except ValueError as refused:
            counts = {"refused": str(refused).splitlines()[-1]}
        except Exception as error:
            counts = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps({"model": model, "method": method, **counts}), flush=True)


if __name__ == "__main__":
    main()
