"""Where attention would move each value, and where the descent on the nonlocal functional would: row by row, in
blocks."""

import dataclasses

import torch
from torch import Tensor

from headwise.statistics.queries import Queries
from headwise.statistics.reading import Reading
from headwise.statistics.scan import Logits, block_size
from headwise.statistics.softmax_block import Memory, SoftmaxBlock


def without_own(weights: Tensor, index: Tensor) -> Tensor:
    """Takes each query's own key, at `index` (b,H,r,1), out of the weights (b,H,r,w), in place.

    It adds nothing to what depends on v_i − v_j; left in, it would cancel only up to rounding.
    """
    return weights.scatter_(-1, index, 0.0)


def pulled(weights: Tensor, values: Tensor) -> Tensor:
    """Sums the columns of values (b,H|Hkv,w,c) by the weights (b,H,r,w): (b,H,r,c)."""
    b, heads, r, w = weights.shape
    groups = values.shape[1]
    mixed = torch.bmm(weights.reshape(b * groups, -1, w), values[:, :, :w].reshape(b * groups, w, -1))
    return mixed.view(b, heads, r, -1)


class Descents:
    """Compares Σ_j A_ij (v_i − v_j) under the layer's own weights with the same under a symmetric kernel, keys for
    queries."""

    def __init__(self, reading: Reading, queries: Queries, dtype: torch.dtype) -> None:
        self.queries, self.dtype = queries, dtype
        # As many keys as query heads, for each of them stands for its queries now.
        keys = reading.k.repeat_interleave(reading.heads // reading.k.shape[1], 1)
        self._logits = Logits(dataclasses.replace(reading, q=keys), queries, dtype)
        self._memory = Memory(block_size(reading, queries.valid.shape[-1]), dtype, reading.q.device)

    def cosines(
        self, weights: Tensor, own: Tensor, values: Tensor, index: Tensor, samples: slice, rows: slice
    ) -> Tensor:
        """Return the cosine of both for a block of rows (b,H,r), 0 where one of them is 0.

        `weights` (b,H,r,w) are the layer's own without each query's key; `own` (b,H,r,dv+2) and `values` hold v, its
        squared norm and a one.
        """
        block = SoftmaxBlock.of(self._logits, samples, rows, self._memory)
        other = without_own(block.weights(self.queries.valid[samples, :, rows].to(self.dtype)), index)
        here, there = (_away(own, pulled(kernel, values)) for kernel in (weights, other))
        return torch.cosine_similarity(here, there, dim=-1, eps=1e-30)


def _away(own: Tensor, mixed: Tensor) -> Tensor:
    """Return Σ_j A_ij (v_i − v_j) from v_i and the sums over keys, whose last column is Σ_j A_ij."""
    return mixed[..., -1:] * own[..., :-2] - mixed[..., :-2]
