"""XSA."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.head_rows import without_own
from headwise.attend.core import Call, Method, MethodState, Site

# Lower bound of a value's squared norm, against division by zero.
TINY = 1e-12


class XSA(Method):
    """Takes from the output of each head its part along the token's own value.

    Exclusive self attention, 2026, arXiv 2603.09078.

    o - strength·(o·v̂)v̂ before the output projection, with v̂ the unit vector of the token's own value, in training and
    evaluation. With `learned=True` the strength is multiplied by a learned gain per head, which starts at 0, so that a
    trained model does not change at first. `gate="tanh"` uses the tanh of the gain, which is within ±1 (pull request
    264 of KellerJordan/modded-nanogpt, 2026). Matrix-free: it only edits the heads' output.
    """

    strength: float = 1.0
    learned: bool = False
    gate: str = "linear"

    neutral = {"strength": 0.0}
    strong = {"strength": 1.0}
    live = ("strength",)
    acts = "both"
    learns = True
    self_only = True
    shapes = ("heads",)

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")
        self.choose("gate", "linear", "tanh")
        self.require(
            self.learned or self.gate == "linear", f'gate="{self.gate}" bounds a learned gain; add learned=True'
        )

    def reads_own_tokens(self) -> bool:
        return True

    def has_parameters(self) -> bool:
        return self.learned

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads is not None  # the plan refuses sites without what `shapes` names
        if self.learned:
            state.parameter("gain", torch.zeros(site.heads, dtype=torch.float32))

    def output(self, o: Tensor, call: Call) -> Tensor:
        # With a cache the values include past tokens; those of the queries are the last.
        own = call.v if call.keys == call.queries else call.v[:, :, call.keys - call.queries :]
        gain = call.state(self).tensor("gain") if self.learned else None
        return without_own(o, own, call.value(self, "strength"), gain, self.gate == "tanh", TINY)
