"""Decorrelation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.matrix import overlap_of
from headwise.attend.core import Call, Method, RowReadings, Site
from headwise.attend.methods.real_tokens import key_counts, only_real_rows, query_counts
from headwise.attend.methods.sampled_rows import check_rows
from headwise.numerics.masked import rows_at
from headwise.numerics.precision import at_least_fp32


class Decorrelation(Method):
    """Penalises Σ_{i<j} ‖A_iᵀ·A_j‖² / N² over all pairs of heads.

    Meindl 2023, "Regularization Techniques for Attention Layers in Transformer Models" (a blog).

    It measures the concentration of weight on few columns, not the similarity of heads: with N = T tokens a pair of
    permutations gives 1/N, equal or not; uniform weights give the minimum, 1/N²; and two maps with all their weight in
    one column each give 1, in the same column or not. For the similarity of heads use `Disagreement`. Averaged over
    samples and layers: the blog specifies neither a reduction nor a coefficient, and its term already grows with the
    number of pairs, so with a mean one strength suits any depth (`AttentionNormPenalty`, a tiny term, is summed).
    Padded queries and keys do not count. Computed exactly as ½(‖Σ G_h‖² - Σ‖G_h‖²) with G_h = A_h·A_hᵀ, which needs the
    weights of all queries, on CUDA in strips. Two settings estimate it without bias and without the matrix, with new
    numbers in each pass: `rows=n` reads n real queries of each sample, drawn without replacement, and weights their
    pairs; of a causal call, the first n/2 queries are always read, because the fewer keys queries see, the more they
    add. `probes=n` draws n random signs per head and key. With 12 heads of random queries and keys, the standard error
    of one sample from `rows=128` was 9 % of the value for 1,024 causal tokens, and 0.1 % for 197 without a mask; a
    batch averages over its samples.
    """

    strength: float = 1.0
    probes: int | None = None
    rows: int | None = None

    neutral = {"strength": 0.0}
    strong = {"strength": 1000.0}
    live = ("strength",)
    penalizes = True
    # A Gram matrix pairs all queries of a map: blocks cannot be read separately.
    rowwise = False
    over_layers = "mean"

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")
        check_rows(self, self.probes, name="probes")
        check_rows(self, self.rows, least=2)
        self.require(self.probes is None or self.rows is None, "give probes or rows, not both")

    def draws(self) -> bool:
        return self.probes is not None or self.rows is not None

    def refuse(self, site: Site) -> str | None:
        return "compares heads, and this layer has only one" if site.heads == 1 else None

    def read(self, a: Tensor, call: Call) -> None:
        if self.probes is not None:
            return self._penalize(self._estimate(at_least_fp32(a) @ at_least_fp32(self._signs(call)), call), call)
        if self.rows is not None:
            positions, drawn = self._drawn(call)
            return self._penalize(self._of_rows(at_least_fp32(rows_at(a, positions)), drawn, call), call)
        return self._penalize(overlap_of(at_least_fp32(a), call.real_queries()), call)

    def read_free(self, rows: RowReadings, call: Call) -> Any:
        if self.rows is not None:
            positions, drawn = self._drawn(call)
            return self._penalize(self._of_rows(rows.weights_at(positions), drawn, call), call)
        if self.probes is None:
            total = rows.overlap()
            return NotImplemented if total is None else self._penalize(total, call)
        return self._penalize(self._estimate(at_least_fp32(rows.attend(self._signs(call))), call), call)

    def _drawn(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return the positions of the queries to read (B, n), and which of them are real, bool (B, n), None for all.

        The first `_certain` of them are not drawn.
        """
        order, real = call.per_sample(call.uniform_draw(self, (call.samples, call.queries))), call.real_queries()
        number, first = self._number(call), self._certain(call)
        if real is None:
            if first:
                order = order.masked_fill(torch.arange(call.queries, device=order.device) < first, 2.0)
            return order.topk(number).indices, None
        real = real.expand(order.shape)
        if first:
            order = order.masked_fill(real.cumsum(-1) <= first, 2.0)
        # Padding comes last.
        positions = order.masked_fill(~real, -1.0).topk(number).indices
        return positions, real.gather(1, positions)

    def _number(self, call: Call) -> int:
        return min(int(self.rows or 0), call.queries)

    def _certain(self, call: Call) -> int:
        """Return how many queries are always read: half of them, the first ones, where they see few keys."""
        return self._number(call) // 2 if call.causal else 0

    def _of_rows(self, a: Tensor, drawn: Tensor | None, call: Call) -> Tensor:
        """Return the estimate (B,) from the weights (B, H, n, N) of the queries that `_drawn` gives."""
        if drawn is not None:
            a = a.masked_fill(~drawn[:, None, :, None], 0.0)
        grams = at_least_fp32(a @ a.mT)
        pairs, first = grams.sum(1).square() - grams.square().sum(1), self._certain(call)
        if drawn is None:
            return (pairs * _weights(call.queries, a.shape[2], first, a.device)).sum((1, 2))
        every = (query_counts(call) - first).clamp(min=0)
        number = every.clamp(max=a.shape[2] - first)
        times = every / number.clamp(min=1)
        of_two = times * (every - 1) / (number - 1).clamp(min=1)
        others = pairs[:, first:, first:]
        alone = others.diagonal(dim1=1, dim2=2).sum(-1)
        total = times * alone + of_two * (others.sum((1, 2)) - alone)
        return (total + pairs[:, :first, :first].sum((1, 2)) + 2 * times * pairs[:, :first, first:].sum((1, 2))) / 2

    def _signs(self, call: Call) -> Tensor:
        shape = (call.samples, call.heads, call.keys, int(self.probes or 0))
        return (call.per_sample(call.uniform_draw(self, shape)) < 0.5).to(call.q.dtype) * 2 - 1

    def _estimate(self, products: Tensor, call: Call) -> Tensor:
        # E (y_iᵀy_j)² = ‖A_iᵀA_j‖² for y_h = A_h·ω_h with independent ω_h; a common ω would be biased.
        products = only_real_rows(products, call)
        heads, probes = products.shape[1], products.shape[3]
        flat = products.transpose(1, 2).flatten(2)
        squares = (flat.mT @ flat).square().unflatten(1, (heads, probes)).unflatten(3, (heads, probes))
        pairs = squares.mean((2, 4))
        return (pairs.sum((1, 2)) - pairs.diagonal(dim1=1, dim2=2).sum(-1)) / 2

    def _penalize(self, total: Tensor, call: Call) -> None:
        call.penalize(self, call.value(self, "strength") * total / key_counts(call).square(), per="sample")


def _weights(queries: int, number: int, first: int, device: torch.device) -> Tensor:
    """Return half of how many pairs of queries each pair of `number` stands for, (n, n), if the first are always read
    and the others drawn."""
    every, drawn = queries - first, number - first
    times = every / max(drawn, 1)
    weights = torch.full(
        (number, number), 0.5 * times * (every - 1) / max(drawn - 1, 1), device=device, dtype=torch.float32
    )
    weights[first:].diagonal(first).fill_(0.5 * times)
    if first:
        weights[:first, first:].fill_(0.5 * times)
        weights[first:, :first].fill_(0.5 * times)
        weights[:first, :first].fill_(0.5)
    return weights
