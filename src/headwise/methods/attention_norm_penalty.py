"""AttentionNormPenalty."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.call import Call, RowReadings
from headwise.core.method import Method
from headwise.core.precision import at_least_fp32
from headwise.methods.real_tokens import key_counts, only_real_rows, query_counts


class AttentionNormPenalty(Method):
    """Penalises the Frobenius norm of the attention weights divided by their number.

    Meindl 2023, "Regularization Techniques for Attention Layers in Transformer Models" (a blog).

    By default the norm of all maps of the batch together, ‖A‖ / numel(A), as in the blog. It is about 1e-5 and falls
    with 1/√(batch·heads), so it hardly acts, and a batch split in two forwards gives a different penalty than the
    whole; a batch split over processes gives the same, as squares are summed before the root. `per_map=True` averages
    ‖A‖ / numel(A) of the single maps, which does not depend on batch and heads. The penalties of the layers are summed;
    the blog does not specify this, nor for `Decorrelation`, which averages. Padded queries and keys count neither in
    norms nor in sizes. Matrix-free: Σ_j A_ij² = exp(L(2s) - 2·L(s)) with L the log-sum-exp of the row.
    """

    strength: float = 1.0
    per_map: bool = False

    neutral = {"strength": 0.0}
    strong = {"strength": 1000.0}
    live = ("strength",)
    penalizes = True
    # One root over all queries: blocks cannot be read separately.
    rowwise = False

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")

    def read(self, a: Tensor, call: Call) -> None:
        self._penalize(at_least_fp32(a).square().sum(-1), call)

    def read_free(self, rows: RowReadings, call: Call) -> None:
        self._penalize(rows.sum_of_squares(), call)

    def _penalize(self, squares: Tensor, call: Call) -> None:
        squares = only_real_rows(squares.unsqueeze(-1), call)[..., 0].sum(2)
        size = (query_counts(call).to(squares.dtype) * key_counts(call)).expand(call.batch)
        # The gradient of the root is infinite at 0, the sum of a call without real queries.
        tiny = torch.finfo(squares.dtype).tiny
        if self.per_map:
            norm = squares.clamp(min=tiny).sqrt() / size[:, None]
        else:
            # The strength is passed separately: inside the root, strength 0 would give an infinite gradient.
            call.penalize_norm(
                self, squares.sum().clamp(min=tiny), size.sum() * call.heads, call.value(self, "strength")
            )
            return
        call.penalize(self, call.value(self, "strength") * norm, per="sample")
