"""Decorrelation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.core.call import Call, RowReadings
from headwise.core.method import Method
from headwise.core.precision import at_least_fp32
from headwise.core.site import Site
from headwise.methods.real_tokens import key_counts, only_real_rows


class Decorrelation(Method):
    """Penalises Σ_{i<j} ‖A_iᵀ·A_j‖² / N² over all pairs of heads.

    Meindl 2023, "Regularization Techniques for Attention Layers in Transformer Models" (a blog).

    It measures the concentration of weight on few columns, not the similarity of heads: with N = T tokens a pair of
    permutations gives 1/N, equal or not; uniform weights give the minimum, 1/N²; and two maps with all their weight in
    one column each give 1, in the same column or not. For the similarity of heads use `Disagreement`. Averaged over
    samples and layers: the blog specifies neither a reduction nor a coefficient, and its term already grows with the
    number of pairs, so with a mean one strength suits any depth (`AttentionNormPenalty`, a tiny term, is summed).
    Padded queries and keys do not count. Computed exactly as ½(‖Σ G_h‖² - Σ‖G_h‖²) with G_h = A_h·A_hᵀ, which needs the
    weights. `probes=n` computes an unbiased matrix-free estimate from n random signs per head and key instead.
    """

    strength: float = 1.0
    probes: int | None = None

    neutral = {"strength": 0.0}
    strong = {"strength": 1000.0}
    live = ("strength",)
    penalizes = True
    # A Gram matrix pairs all queries of a map: blocks cannot be read separately.
    rowwise = False
    over_layers = "mean"

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")
        whole = isinstance(self.probes, int) and not isinstance(self.probes, bool) and self.probes >= 1
        self.require(
            self.probes is None or whole, f"probes must be a whole number from 1, or None, got {self.probes!r}"
        )

    def draws(self) -> bool:
        return self.probes is not None

    def refuse(self, site: Site) -> str | None:
        return "compares heads, and this layer has only one" if site.heads == 1 else None

    def read(self, a: Tensor, call: Call) -> None:
        if self.probes is not None:
            return self._penalize(self._estimate(at_least_fp32(a) @ at_least_fp32(self._signs(call)), call), call)
        a = only_real_rows(at_least_fp32(a), call)
        # One product per head instead of one per pair of heads.
        grams = a @ a.mT
        total = grams.sum(1).square().sum((1, 2)) - grams.square().sum((1, 2, 3))
        return self._penalize(total / 2, call)

    def read_free(self, rows: RowReadings, call: Call) -> Any:
        if self.probes is None:
            return NotImplemented
        return self._penalize(self._estimate(at_least_fp32(rows.attend(self._signs(call))), call), call)

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
