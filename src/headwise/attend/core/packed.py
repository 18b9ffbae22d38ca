"""Packed: conversion between rows that hold several sequences and a batch with one sequence per sample.

Packed and padding-free batches concatenate sequences in one row. Methods, penalties and statistics are defined for
single sequences: each becomes a sample, padded on the right, and the results are written back into the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Packed:
    """The positions of S sequences of at most L tokens in B packed rows of T tokens.

    Attributes:
        rows, tokens: B and T.
        starts, lengths: (S,) int, index of the first token of each sequence in the flattened rows, and its length.
        longest: L.
        padding: (B·T,) bool, True for tokens that belong to no sequence, or None where all belong to one.
        real: (S, L) bool, True for tokens, False for padding.
        places: (S, L) int, the index of each token in the flattened rows.
    """

    rows: int
    tokens: int
    starts: Tensor
    lengths: Tensor
    longest: int
    padding: Tensor | None = None
    real: Tensor = field(init=False)
    places: Tensor = field(init=False)
    _back: Tensor = field(init=False)
    _masks: dict[tuple[bool, int | None], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        offsets = torch.arange(self.longest, device=self.starts.device)[None]
        self.real = offsets < self.lengths[:, None]
        # Padding reads the first token of its sequence, a valid index; `unpack` then sets it to 0.
        self.places = self.starts[:, None] + torch.where(self.real, offsets, 0)
        sequence = self._sequence()
        every = torch.arange(self.rows * self.tokens, device=self.starts.device)
        self._back = (sequence * self.longest + every - self.starts[sequence]).masked_fill(sequence < 0, 0)

    def _sequence(self) -> Tensor:
        """Return the index of the sequence of each token of the flattened rows, (B·T,); -1 for padding."""
        marks = torch.zeros(self.rows * self.tokens, dtype=torch.long, device=self.starts.device)
        sequence = marks.index_fill(0, self.starts, 1).cumsum(0) - 1
        return sequence if self.padding is None else sequence.masked_fill(self.padding, -1)

    @classmethod
    def of_starts(cls, first: Tensor, padding: Tensor) -> Packed | None:
        """Return the packing of rows without `padding` (B, T) whose sequences start where `first` (B, T) is True.

        A sequence ends before its first padding. None if all is padding.
        """
        starts = (first & ~padding).flatten().nonzero()[:, 0]
        if not len(starts):
            return None
        rows, tokens = first.shape
        bounds = torch.cat([starts, starts.new_full((1,), rows * tokens)])
        # The number of tokens that are not padding in each sequence, from the sums before its bounds.
        kept = torch.cat([starts.new_zeros(1), (~padding).flatten().cumsum(0)])
        lengths = kept[bounds].diff()
        return cls(rows, tokens, starts, lengths, int(lengths.max()), padding.flatten() if padding.any() else None)

    @property
    def sequences(self) -> int:
        """Return the number of sequences."""
        return self.starts.shape[0]

    def holds(self, x: Tensor) -> bool:
        """Return whether the first dimensions of x are those of these rows, (B, T)."""
        return x.dim() >= 2 and tuple(x.shape[:2]) == (self.rows, self.tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """Return x (B, T, ...) as (S, L, ...), 0 in padding."""
        samples = x.flatten(0, 1)[self.places]
        return samples.masked_fill(~self.real.view(*self.real.shape, *[1] * (x.dim() - 2)), 0)

    def pack(self, y: Tensor) -> Tensor:
        """Return y (S, L, ...) as (B, T, ...), 0 in padding."""
        rows = y.flatten(0, 1)[self._back]
        if self.padding is not None:
            rows = rows.masked_fill(self.padding.view(-1, *[1] * (rows.dim() - 1)), 0)
        return rows.unflatten(0, (self.rows, self.tokens))

    def unpack_heads(self, x: Tensor) -> Tensor:
        """Return x (B, H, T, D) as (S, H, L, D), 0 in padding."""
        return self.unpack(x.transpose(1, 2)).transpose(1, 2)

    def pack_heads(self, y: Tensor) -> Tensor:
        """Return y (S, H, L, D) as (B, H, T, D)."""
        return self.pack(y.transpose(1, 2)).transpose(1, 2)

    def unpack_matrix(self, mask: Tensor) -> Tensor:
        """Return a mask (B|1, H|1, T|1, T) for each sequence, (S, H|1, L, L), with padded keys forbidden."""
        row, place = self.starts // self.tokens, self.places % self.tokens
        mask = mask.expand(-1, -1, self.tokens, -1)
        row = row if mask.shape[0] > 1 else torch.zeros_like(row)
        # Advanced indices on both sides of a slice put their dimensions first: (S, L, L, H|1).
        own = mask[row[:, None, None], :, place[:, :, None], place[:, None, :]].permute(0, 3, 1, 2)
        padding = ~self.real[:, None, None, :]
        return own.masked_fill(padding, False if own.dtype == torch.bool else float("-inf"))

    def pack_matrix(self, weights: Tensor) -> Tensor:
        """Return weights (S, H, L, L) as (B, H, T, T), 0 between sequences and in padding."""
        own, sequence, place = (
            x.view(self.rows, self.tokens)
            for x in (self._sequence(), self._back // self.longest, self._back % self.longest)
        )
        rows = weights[sequence[:, :, None], :, place[:, :, None], place[:, None, :]].permute(0, 3, 1, 2)
        return rows.masked_fill(((own[:, :, None] != own[:, None, :]) | (own[:, :, None] < 0))[:, None], 0)

    def mask(self, causal: bool, window: int | None) -> Tensor:
        """Return which keys of its sequence each query may see, (S, 1, L|1, L) bool.

        These are earlier keys if `causal`, and keys less than `window` positions away if `window` is not None.
        """
        if (causal, window) not in self._masks:
            self._masks[causal, window] = self.real[:, None, None, :] & order(
                self.longest, self.longest, causal, window, self.real.device
            )
        return self._masks[causal, window]

    def allows_across(self, allowed: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """Return whether a mask lets a token see another sequence or padding, or hides it from itself.

        Then the host does not treat these as separate sequences.

        Args:
            allowed: takes rows (R,) and query positions (q,); returns which keys they may see, bool (R, q, T).
        """
        device = self.starts.device
        sequence = self._sequence().view(self.rows, self.tokens)
        wrong = torch.zeros((), dtype=torch.bool, device=device)
        rows = torch.arange(self.rows, device=device)
        places = torch.arange(self.tokens, device=device)
        for queries in places.split(1024):
            seen = allowed(rows, queries).expand(self.rows, len(queries), self.tokens)
            foreign = sequence[:, queries, None] != sequence[:, None, :]
            itself = queries[:, None] == places
            inside = (sequence >= 0)[:, queries, None]
            wrong = wrong | (inside & (seen & foreign | ~seen & itself)).any()
        return bool(wrong)


def order(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each query may see, bool (T|1, N); the last query is at the position of the last key."""
    if not causal and window is None:
        return torch.ones(1, keys, dtype=torch.bool, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)
