"""SymmetricAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.core.method import Method

if TYPE_CHECKING:
    from headwise.core.call import Call


class SymmetricAttention(Method):
    """Puts the queries in the place of the keys.

    Nguyen et al. 2023, arXiv 2312.00751 (the symmetric variant).

    In training and evaluation. The key projection is left without gradient. With grouped queries each query head becomes its
    own key head. Generation with a cache is refused in the call: the cache holds the keys of past tokens, not their queries.
    """

    no_neutral = "queries either stand in for the keys or not"
    acts = "both"
    self_only = True

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        if call.queries != call.keys:
            raise ValueError(
                f"SymmetricAttention needs a query for each key at {call.site.name}, got {call.queries} queries and "
                f"{call.keys} keys; run it without a cache (use_cache=False) and without extra keys"
            )
        return q, q, v
