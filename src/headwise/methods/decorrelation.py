"""Decorrelation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise.core.method import Method
from headwise.core.precision import at_least_fp32
from headwise.methods.real_tokens import key_counts, only_real_rows

if TYPE_CHECKING:
    from headwise.core.call import Call
    from headwise.core.row_readings import RowReadings
    from headwise.core.site import Site


class Decorrelation(Method):
    """Penalises Σ_{i<j} ‖A_iᵀ·A_j‖² / N² over all pairs of heads.

    Meindl 2023, "Regularization Techniques for Attention Layers in Transformer Models" (a blog).

    What it measures is how few columns take the weight, and not how alike two heads are: with N = T tokens a pair of
    permutations gives 1/N whether equal or different, uniform weights give the least, 1/N², and weights that all lie in
    one column give 1, in the same column or in another. For alikeness of heads use `Disagreement`. Averaged over
    samples and layers: the blog names neither reduction nor coefficient, and its term grows with the pairs of heads
    already, so that a mean keeps one strength fit for any depth (`AttentionNormPenalty`, a tiny term, adds up). Padded
    queries and keys do not count. Exact by ½(‖Σ G_h‖² - Σ‖G_h‖²), G_h = A_h·A_hᵀ, which needs the weights. `probes=n`
    gives instead an unbiased estimate from n random signs per head and key, matrix-free.
    """

    strength: float = 1.0
    probes: int | None = None

    neutral = {"strength": 0.0}
    strong = {"strength": 1000.0}
    live = ("strength",)
    penalizes = True
    # A Gram matrix pairs all queries of a map: blocks of them cannot be read apart.
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
        return "one head has no other to be compared with" if site.heads == 1 else None

    def read(self, a: Tensor, call: Call) -> None:
        if self.probes is not None:
            return self._penalize(self._estimate(at_least_fp32(a) @ at_least_fp32(self._signs(call)), call), call)
        a = only_real_rows(at_least_fp32(a), call)
        # One product for each head, and none for each pair of them.
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

    def _estimate(self, seen: Tensor, call: Call) -> Tensor:
        # E (y_iᵀy_j)² = ‖A_iᵀA_j‖² for y = A·ω with an ω of its own per head; one ω for both would be biased.
        seen = only_real_rows(seen, call)
        heads, probes = seen.shape[1], seen.shape[3]
        flat = seen.transpose(1, 2).flatten(2)
        squares = (flat.mT @ flat).square().unflatten(1, (heads, probes)).unflatten(3, (heads, probes))
        pairs = squares.mean((2, 4))
        return (pairs.sum((1, 2)) - pairs.diagonal(dim1=1, dim2=2).sum(-1)) / 2

    def _penalize(self, total: Tensor, call: Call) -> None:
        call.penalize(self, call.value(self, "strength") * total / key_counts(call).square(), per="sample")
