"""ValueResidual."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Method


class ValueResidual(Method):
    """Mixes the values of the first layer into those of every later one, before attention.

    Zhou et al. 2024, arXiv 2410.17897 (ResFormer).

    V ← (1 - mix)·V + mix·V¹ in training and evaluation. V¹ are the values, with gradient, of the stack's first self
    attention, which is left unchanged. `mix=1` is the paper's SVFormer: the values of one layer for all.
    """

    mix: float = 0.5

    neutral = {"mix": 0.0}
    strong = {"mix": 0.9}
    live = ("mix",)
    acts = "both"
    carries = True
    self_only = True

    def check(self) -> None:
        self.require(0 <= self.mix <= 1, f"mix must lie in [0, 1], got {self.mix}")

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        first = call.first_values()
        if first is None:
            return q, k, v
        if first.shape[2] != v.shape[2]:
            raise RuntimeError(
                f"ValueResidual mixes values token by token, and {call.site.name} keeps {v.shape[2]} tokens in its "
                f"cache while the first self attention of its stack keeps {first.shape[2]} (sliding windows of "
                "different sizes): generate with use_cache=False, or leave these layers out with where="
            )
        mix = call.value(self, "mix")
        return q, k, (1 - mix) * v + mix * first
