"""Strips of matrices of attention weights: which samples and queries are in memory together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# Bytes of the memory of a strip.
STRIP = 128 << 20


def step_of(keys: int) -> int:
    """Return the entries from one row of a strip to the next: whole groups of 16, which are 32 bytes or more."""
    return -(-keys // 16) * 16


def strips(batch: int, heads: int, queries: int, keys: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first and last sample and query of each strip, of numbers of `size` bytes.

    A strip takes as many whole samples as fit, all of about the same number; or queries of one sample, a multiple of
    128 of them.
    """
    of_query = heads * step_of(keys) * size
    samples = max(1, STRIP // (of_query * queries))
    samples = -(-batch // -(-batch // samples))
    rows = queries if of_query * queries <= STRIP else max(128, STRIP // of_query // 128 * 128)
    for b in range(0, batch, samples):
        for row in range(0, queries, rows):
            yield b, min(b + samples, batch), row, min(row + rows, queries)


def part_of(x: Tensor | None, first: int, last: int) -> Tensor | None:
    """Return the samples of a tensor whose first dimension is the batch, or 1 and left alone."""
    return x if x is None or x.shape[0] == 1 else x[first:last]


def rows_of_a_strip(heads: int, others: int, queries: int, size: int) -> int:
    """Return how many of the queries a strip takes, with `size` bytes for each of (heads, rows, others)."""
    rows = STRIP // (heads * others * size)
    return queries if rows >= queries else max(128, rows // 128 * 128)
