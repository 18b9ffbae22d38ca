"""SymmetricAttention."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Method


class SymmetricAttention(Method):
    """Uses the queries as keys, or the keys as queries.

    Nguyen et al. 2023, arXiv 2312.00751 (the symmetric variant).

    In training and evaluation. `keep` names the one that is used for both; the projection of the other gets no
    gradient. "keys" is the paper's derivation, from the kernel exp(k(x)ᵀk(y)/√D). The default uses the queries: the
    same function of the other matrix, if queries and keys have equally many heads. With grouped queries, "queries"
    makes each query head its own key head. Generation with a cache is refused in the call, because a cache holds the
    keys of past tokens and not their queries.
    """

    # A public setting with the name of a stage. The stage is only used by methods with `logits` or `weights`.
    keep: str = "queries"  # type: ignore[assignment]

    no_neutral = "queries either replace the keys or not"
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
