"""LSA."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import divided
from headwise.attend.core import Call, Method, MethodState, Site
from headwise.attend.methods.real_tokens import whole_of


class LSA(Method):
    """Hides each token's own key from it and divides the logits by a learned temperature.

    Locality self-attention: Lee, Lee and Song 2021, arXiv 2112.13492 (vision transformers on small data sets).

    In training and evaluation. The temperature is one number per head, as in the authors' code, or with `per="layer"`
    one for all heads. It starts at 1 in addition to the host's own scale, which equals the paper's start at √d.
    `diagonal=False` only learns the temperature. Causal layers are refused, because the first token sees only itself.
    Matrix-free with a mask of the diagonal. State dicts of headwise 0.2 hold one number per layer: `per="layer"` loads
    them.
    """

    diagonal: bool = True
    per: str = "head"

    no_neutral = "the diagonal is masked whatever the temperature is"
    acts = "both"
    learns = True
    self_only = True
    shapes = ("heads",)
    rowwise = True

    def check(self) -> None:
        self.choose("per", "head", "layer")

    def refuse(self, site: Site) -> str | None:
        if self.diagonal and site.causal:
            return (
                "leaves the first token without a key, because it sees only itself here; LSA(diagonal=False) only "
                "learns the temperature"
            )
        if self.diagonal and site.pooled:
            return "needs queries and keys of the same tokens, and this layer pools one of them"
        return None

    def reads_own_tokens(self) -> bool:
        return self.diagonal

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads is not None  # the plan refuses sites without what `shapes` names
        # A vector even for one number, because FSDP2 cannot shard scalars.
        state.parameter("temperature", torch.ones(site.heads if self.per == "head" else 1, dtype=torch.float32))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        return divided(q, call.state(self).tensor("temperature")), k, v

    def logits(self, s: Tensor, call: Call) -> Tensor:
        keep = self.keep(call)
        return s if keep is None else s.masked_fill(~keep, float("-inf"))

    def scores(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
        # Without the mask of the diagonal, the logits do not change.
        return None if self.diagonal else (q, k)

    def keep(self, call: Call) -> Tensor | None:
        """Return all keys but a query's own, bool (B|1, 1, T, N); a query that may see no other key keeps its own."""
        if not self.diagonal:
            return None
        # With a cache or extra keys, the queries' own keys are the last.
        whole = whole_of(call)
        query = call.query_positions() + (whole.keys - whole.queries)
        own = query[:, None, :, None] == torch.arange(call.keys, device=call.q.device)
        return ~own | (call.allowed_counts() <= 1)
