"""The figures of rows, of columns, of pairs of heads and of tokens by Triton kernels, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.health.statistics.reading import Queries, Reading
from headwise.numerics.kernels import kernels_run_on

OF_ROWS = ("top", "entropy", "peak", "distance", "centred", "on_text", "roughness", "lse", "descent")
OF_PAIRS = ("likeness", "crossing")
# The figures that the kernels compute.
FIGURES = frozenset({*OF_ROWS, "columns", *OF_PAIRS})
# The largest number of heads of both layers whose products a kernel computes.
LARGEST_HEADS = 64
LARGEST_SIZE = 256
# The dtypes that the kernels read, the widest tokens, and programs that keep the largest GPUs busy.
DTYPES = {torch.float32, torch.float16, torch.bfloat16}
WIDEST = 8192
PROGRAMS = 264


def by_kernels(
    reading: Reading, queries: Queries, needs: set[str], previous: Reading | None = None
) -> dict[str, Tensor]:
    """Return those of the needed figures that kernels compute for this reading, by name; none off CUDA.

    Soft-caps, learned sinks, edits of the logits and logits that need fp64 are left to the PyTorch form.
    """
    if not (needs & FIGURES and kernels_run_on(reading.q.device) and _readable(reading)):
        return {}
    needs = needs & FIGURES
    heads = reading.heads
    if "crossing" in needs:
        if previous is None or not (_readable(previous) and _alike(reading, previous)):
            # The maps of both layers are read together, or by the PyTorch form.
            needs = needs - {"crossing"}
            previous = None
        else:
            heads += previous.heads
    if heads > LARGEST_HEADS:
        needs, previous = needs - set(OF_PAIRS), None
    return _read(reading, queries, needs, previous if "crossing" in needs else None) if needs else {}


def _readable(reading: Reading) -> bool:
    """Return whether the kernels read this reading."""
    tensors = (reading.q, reading.k, reading.v)
    plain = reading.softcap is None and reading.sinks is None and reading.edit is None
    kinds = {x.dtype for x in tensors}
    return (
        plain
        and reading.factor > 0
        and len(kinds) == 1
        and kinds <= DTYPES
        and all(x.numel() > 0 and x.shape[-1] <= LARGEST_SIZE and reading.heads % x.shape[1] == 0 for x in tensors)
    )


def _alike(reading: Reading, previous: Reading) -> bool:
    facts = [(x.q.dtype, x.q.device, x.q.shape[-1], x.causal, x.queries, x.keys, x.batch) for x in (reading, previous)]
    return facts[0] == facts[1]


def _read(reading: Reading, queries: Queries, needs: set[str], previous: Reading | None) -> dict[str, Tensor]:
    own = bool(needs & {"roughness", "descent"})
    real = reading.real_queries
    real = real if real is not None and real.shape[1] == reading.keys else None
    text = [] if reading.text is None else [reading.text.start, reading.text.stop]
    common = (queries.positions, not queries.sampled, reading.causal)
    mask = _mask(reading, queries)
    written = read_rows(
        reading.q, reading.k, reading.v if own else None, mask, queries.counts, queries.valid, real,
        *common, reading.factor, text, "centred" in needs, "descent" in needs,
    )  # fmt: skip
    figures = {name: written[at] for at, name in enumerate(OF_ROWS) if name in needs}
    lse = written[OF_ROWS.index("lse")]
    if not queries.sampled:
        # A copy, because the other figures need not be kept until the layer after is read.
        reading.kept["lse"] = lse.clone()
    if "columns" in needs:
        figures["columns"] = read_columns(
            reading.q, reading.k, mask, queries.counts, queries.valid, lse, *common, reading.factor
        )
    if needs & set(OF_PAIRS):
        figures |= _of_pairs(reading, queries, needs, previous, mask, lse)
    return figures


def of_tokens(reading: Reading, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return of each sample the mean cosine of pairs of tokens, ‖x − mean‖_F/‖x‖_F and the largest |x|, each (B,) fp32.

    `tokens` (B,T,C) are a tensor of the reading, of which padding is left out. Figures without a number are NaN.
    None where no kernel computes them.
    """
    fits = tokens.dtype in DTYPES and tokens.numel() > 0 and tokens.shape[-1] <= WIDEST
    if not (fits and kernels_run_on(tokens.device)):
        return None
    if id(tokens) not in reading.kept:
        reading.kept[id(tokens)] = read_tokens(tokens, reading.real_queries)
    cosine, share, largest = reading.kept[id(tokens)]
    return cosine, share, largest


def token_parts(batch: int, tokens: int) -> int:
    """Return in how many parts the kernels read the tokens of a sample."""
    return max(1, min(PROGRAMS // batch, -(-tokens // 16)))


def _mask(reading: Reading, queries: Queries) -> Tensor | None:
    whole = None if queries.sampled else slice(0, reading.queries)
    return reading.mask_at(slice(None), queries.positions, whole)


def _of_pairs(
    reading: Reading, queries: Queries, needs: set[str], previous: Reading | None, mask: Tensor | None, lse: Tensor
) -> dict[str, Tensor]:
    """Return the cosines of the layer's maps with one another and with those of the layer before."""
    common = (queries.positions, not queries.sampled, reading.causal)
    before: list[Tensor] = []
    mask_before, factor = None, 1.0
    if previous is not None:
        mask_before, factor = _mask(previous, queries), previous.factor
        # The same rows count in both layers.
        valid = queries.valid.amax(1, keepdim=True)
        lse_before = None if queries.sampled else previous.kept.get("lse")
        if lse_before is None:
            written = read_rows(
                previous.q, previous.k, None, mask_before, queries.counts[:, :1], valid, None,
                *common, factor, [], False, False,
            )  # fmt: skip
            lse_before = written[OF_ROWS.index("lse")]
        before = [previous.q, previous.k, lse_before, valid]
    inner = read_products(
        reading.q, reading.k, mask, queries.counts, queries.valid, lse, before, mask_before,
        *common, reading.factor, factor,
    )  # fmt: skip
    sizes = inner.diagonal(dim1=1, dim2=2).sqrt()
    cosines = (inner / (sizes[:, :, None] * sizes[:, None])).clamp_(max=1)
    parts = {"likeness": cosines[:, : reading.heads, : reading.heads], "crossing": cosines[:, : reading.heads]}
    parts["crossing"] = parts["crossing"][:, :, reading.heads :]
    return {name: parts[name] for name in OF_PAIRS if name in needs}


# Operators, so that what they launch can be counted without a device.
@torch.library.custom_op("headwise::read_rows", mutates_args=())
def read_rows(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None, counts: Tensor, valid: Tensor, real: Tensor | None,
    positions: Tensor, ordered: bool, causal: bool, scale: float, text: list[int], centred: bool, descent: bool,
) -> Tensor:  # fmt: skip
    """Return the figures `OF_ROWS` of each row, (9, B, H, R) in fp32: see `triton_figures.figures`."""
    from headwise.health.statistics import triton_figures

    rows = triton_figures.FigureRows(q, k, mask, positions, counts, valid, causal, scale, ordered)
    return triton_figures.figures(rows, v, real, slice(*text) if text else None, centred=centred, descent=descent)


read_rows.register_fake(
    lambda q, k, v, mask, counts, valid, real, positions, *_: q.new_empty(
        len(OF_ROWS), *q.shape[:2], positions.shape[1], dtype=torch.float32
    )
)


@torch.library.custom_op("headwise::read_columns", mutates_args=())
def read_columns(
    q: Tensor, k: Tensor, mask: Tensor | None, counts: Tensor, valid: Tensor, lse: Tensor,
    positions: Tensor, ordered: bool, causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Return the mean weight of each key, (B, H, N) in fp32."""
    from headwise.health.statistics import triton_figures

    return triton_figures.columns(
        triton_figures.FigureRows(q, k, mask, positions, counts, valid, causal, scale, ordered), lse
    )


read_columns.register_fake(lambda q, k, *_: q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32))


@torch.library.custom_op("headwise::read_products", mutates_args=())
def read_products(
    q: Tensor, k: Tensor, mask: Tensor | None, counts: Tensor, valid: Tensor, lse: Tensor,
    before: list[Tensor], mask_before: Tensor | None,
    positions: Tensor, ordered: bool, causal: bool, scale: float, scale_before: float,
) -> Tensor:  # fmt: skip
    """Return the inner products of the maps of all heads, (B, H + H', H + H') in fp32.

    `before` is the q, k, log-sum-exps and valid rows of the layer before, or empty.
    """
    from headwise.health.statistics import triton_figures, triton_products

    rows = triton_figures.FigureRows(q, k, mask, positions, counts, valid, causal, scale, ordered)
    if not before:
        return triton_products.head_products(rows, lse, None, None)
    q, k, lse_before, valid = before
    other = triton_figures.FigureRows(q, k, mask_before, positions, counts, valid, causal, scale_before, ordered)
    return triton_products.head_products(rows, lse, other, lse_before)


@read_products.register_fake
def _(q: Tensor, k: Tensor, mask: Any, counts: Any, valid: Any, lse: Any, before: list[Tensor], *_: Any) -> Tensor:
    heads = q.shape[1] + (before[0].shape[1] if before else 0)
    return q.new_empty(q.shape[0], heads, heads, dtype=torch.float32)


@torch.library.custom_op("headwise::read_tokens", mutates_args=())
def read_tokens(tokens: Tensor, real: Tensor | None) -> Tensor:
    """Return three figures of the tokens of each sample, (3, B) in fp32: see `triton_tokens.figures`."""
    from headwise.health.statistics import triton_tokens

    return triton_tokens.figures(tokens, real, token_parts(*tokens.shape[:2]))


@read_tokens.register_fake
def _(tokens: Tensor, real: Tensor | None) -> Tensor:
    return tokens.new_empty(3, tokens.shape[0], dtype=torch.float32)
