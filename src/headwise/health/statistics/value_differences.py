"""Sums of the differences v_i − v_j over the keys j of each query i, by the layer's attention and a symmetric one."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headwise.health.statistics.reading import Queries, Reading
from headwise.health.statistics.scan import FAR, Logits, SoftmaxBlock, block_size
from headwise.numerics.precision import directions, magnitude


class ValueDifferences:
    """Reader of Σ_j A_ij (v_i − v_j) and Σ_j A_ij ‖v_i − v_j‖², block by block.

    A query's own key adds nothing to them, so the softmax leaves it out: where attention is sharp, the weights of the
    other keys may be too small for any dtype, and their shares among themselves are not. The values are taken about
    their mean, which changes no difference and reduces rounding errors, and in a unit in which no square underflows.

    Args:
        symmetric: whether a kernel whose queries are the keys is read too.
    """

    def __init__(self, reading: Reading, queries: Queries, dtype: torch.dtype, symmetric: bool) -> None:
        self.reading, self.queries = reading, queries
        self._scratch = torch.empty(block_size(reading, queries.valid.shape[-1]), dtype=dtype, device=reading.q.device)
        self._values, self._unit = values_about_their_mean(reading, dtype)
        self._symmetric = None
        if symmetric:
            # Repeated to the number of query heads, because the keys replace the queries.
            keys = reading.k.repeat_interleave(reading.heads // reading.k.shape[1], 1)
            self._symmetric = Logits(dataclasses.replace(reading, q=keys), queries, dtype)

    def read(self, block: SoftmaxBlock, samples: slice, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return Σ_j A_ij ‖v_i − v_j‖² and, with a symmetric kernel, the cosines of Σ_j A_ij (v_i − v_j) under both.

        Both are (b,H,r). The cosine is 0 where one of the sums is 0. `block` must still hold its depth.
        """
        positions = self.queries.positions
        positions = positions[samples, rows] if positions.shape[0] > 1 else positions[:, rows]
        index = positions[:, None, :, None].expand(*block.depth.shape[:3], 1)
        own = self._own(samples, rows, index)
        mixed, most = self._mixed(block.depth, samples, index)
        inner = (own[..., :-2] * mixed[..., :-2]).sum(-1)
        squares = (own[..., -2] * mixed[..., -1] + mixed[..., -2] - 2 * inner).clamp_min(0)
        unit = self._by_head(self._unit[samples])[..., 0]
        roughness = (most + block.log_peak).exp() * unit * squares * unit
        if self._symmetric is None:
            return roughness, None
        logits, _ = self._symmetric.block(samples, rows, self._scratch)
        under_keys, _ = self._mixed(logits, samples, index)
        first, second = (direction(own, by_kernel) for by_kernel in (mixed, under_keys))
        return roughness, (first * second).sum(-1).clamp(-1, 1)

    def _own(self, samples: slice, rows: slice, index: Tensor) -> Tensor:
        """Return the values of the queries themselves, (b,H,r,dv+2)."""
        values = self._values[samples]
        if not self.queries.sampled:
            return self._by_head(values[:, :, rows])
        return self._by_head(values.gather(2, index[:, :1].expand(-1, values.shape[1], -1, values.shape[-1])))

    def _by_head(self, x: Tensor) -> Tensor:
        repeat = self.reading.heads // x.shape[1]
        return x if repeat == 1 else x.repeat_interleave(repeat, 1)

    def _mixed(self, logits: Tensor, samples: slice, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ_j exp(logit_j − most)·value_j (b,H,r,dv+2) over the keys but those at `index`, and `most` (b,H,r).

        `most` is the largest logit of these keys. The logits (b,H,r,w) are left as they were.
        """
        b, heads, r, w = logits.shape
        own = logits.gather(-1, index)
        logits.scatter_(-1, index, FAR)
        most = logits.amax(-1)
        out = self._scratch[: logits.numel()].view(logits.shape)
        if out.data_ptr() == logits.data_ptr():
            powers = logits.sub_(most[..., None]).exp_()
        else:
            powers = torch.sub(logits, most[..., None], out=out).exp_()
            logits.scatter_(-1, index, own)
        values = self._values[samples]
        groups = values.shape[1]
        mixed = torch.bmm(powers.reshape(b * groups, -1, w), values[:, :, :w].reshape(b * groups, w, -1))
        return mixed.view(b, heads, r, -1), most


def values_about_their_mean(reading: Reading, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return v − mean, its squared norm and a one, (B,H|Hkv,N,dv+2), in the unit (B,H|Hkv,1,1), and the unit."""
    v, real = reading.v.to(dtype), reading.real_queries
    if real is not None:
        # Padding may hold any value.
        v = v.masked_fill(~real[:, None, :, None], 0)
    unit = magnitude(v, (2, 3))
    v = v / unit
    count = v.shape[2] if real is None else real.sum(-1).clamp_min(1)[:, None, None, None]
    v -= v.sum(2, keepdim=True) / count
    square = v.square().sum(-1, keepdim=True)
    return torch.cat([v, square, torch.ones_like(square)], -1), unit


def direction(own: Tensor, mixed: Tensor) -> Tensor:
    """Return the direction (b,H,r,dv) of Σ_j w_j (v_i − v_j), 0 where it is no longer than its rounding error."""
    kept, moved = mixed[..., -1:] * own[..., :-2], mixed[..., :-2]
    difference = kept - moved
    size = torch.linalg.vector_norm(kept, dim=-1) + torch.linalg.vector_norm(moved, dim=-1)
    rounding = ROUNDINGS * torch.finfo(own.dtype).eps * size
    return directions(difference) * (torch.linalg.vector_norm(difference, dim=-1) > rounding)[..., None]


# The error of a difference of two sums, in units of their rounding.
ROUNDINGS = 4
