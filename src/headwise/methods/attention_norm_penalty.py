"""AttentionNormPenalty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.core.method import Method
from headwise.core.precision import at_least_fp32
from headwise.methods.real_tokens import key_counts, only_real_rows, query_counts

if TYPE_CHECKING:
    from headwise.core.call import Call
    from headwise.core.row_readings import RowReadings


class AttentionNormPenalty(Method):
    """Penalises the Frobenius norm of the attention weights divided by their number.

    Meindl 2023, "Regularization Techniques for Attention Layers in Transformer Models" (a blog).

    By default the norm of all maps of the batch together, ‖A‖ / numel(A), as there: about 1e-5 and falling with
    1/√(batch·heads), so that it hardly acts, and a batch split in two forwards gives other numbers than the whole
    (split over processes it gives the same: squares are summed before the root). `per_map=True` takes each map's own
    norm and number and averages: independent of batch and heads. Layers add up, each being one term of the loss; the
    blog does not say (for `Decorrelation`, which averages, neither). Padded queries and keys count in neither.
    Matrix-free: Σ_j A_ij² = exp(L(2s) - 2·L(s)) with L the log of the row's sum of exponentials.
    """

    strength: float = 1.0
    per_map: bool = False

    neutral = {"strength": 0.0}
    strong = {"strength": 1000.0}
    live = ("strength",)
    penalizes = True
    # One root is taken over all queries: blocks of them cannot be read apart.
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
        # The root's gradient at 0 is infinite, and a call without any real query sums up to 0.
        tiny = torch.finfo(squares.dtype).tiny
        if self.per_map:
            norm = squares.clamp(min=tiny).sqrt() / size[:, None]
        else:
            # The strength stays outside of the root: at strength 0 the root's gradient would be infinite.
            call.penalize_norm(
                self, squares.sum().clamp(min=tiny), size.sum() * call.heads, call.value(self, "strength")
            )
            return
        call.penalize(self, call.value(self, "strength") * norm, per="sample")
