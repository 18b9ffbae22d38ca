"""SymmetricAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.core.method import Method

if TYPE_CHECKING:
    from headwise.core.call import Call


class SymmetricAttention(Method):
    """Puts the queries in the place of the keys, or the keys in that of the queries.

    Nguyen et al. 2023, arXiv 2312.00751 (the symmetric variant).

    In training and evaluation. `keep` names what stays and stands for both; the other projection is left without
    gradient. The paper's derivation, from the kernel exp(k(x)ᵀk(y)/√D), has the keys on both sides: that is "keys". The
    default puts the queries there: the same function of one matrix, with the other name, while queries and keys have as
    many heads. With grouped queries, under "queries" each query head becomes its own key head. Generation with a cache
    is refused in the call: the cache holds the keys of past tokens, not their queries.
    """

    # A public setting with the name of a stage, which only methods that edit logits or weights are asked for.
    keep: str = "queries"  # type: ignore[assignment]

    no_neutral = "queries either stand in for the keys or not"
    acts = "both"
    self_only = True

    def check(self) -> None:
        self.choose("keep", "queries", "keys")

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        if call.queries != call.keys:
            raise ValueError(
                f"SymmetricAttention needs a query for each key at {call.site.name}, got {call.queries} queries and "
                f"{call.keys} keys; run it without a cache (use_cache=False) and without extra keys"
            )
        return (q, q, v) if self.keep == "queries" else (k, k, v)
