"""NeuTRENO."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Method, Site


class NeuTRENO(Method):
    """Adds the difference between the first layer's values and the layer's own to the output of each head.

    Nguyen et al. 2023, arXiv 2312.00751.

    A·V + strength·(V⁰ - V) before the output projection, in training and evaluation. V⁰ are the values, with gradient,
    of the stack's first self attention, which is left unchanged. Published strengths: 0.6 for DeiT and Segmenter, 0.4
    for a language model. With `warmup_steps` the strength rises linearly from 0 over that many optimizer steps, so that
    the function of a trained model does not change at once.
    """

    strength: float = 0.6
    warmup_steps: int = 0

    neutral = {"strength": 0.0}
    strong = {"strength": 0.9}
    live = ("strength",)
    acts = "both"
    carries = True
    self_only = True

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")
        self.require(self.warmup_steps >= 0, f"warmup_steps must be at least 0, got {self.warmup_steps}")

    def at(self, name: str, step: int, site: Site) -> float:
        return self.strength * (min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0)

    def ahead(self, call: Call) -> Tensor | None:
        first = call.first_values()
        if first is None:
            return None
        # With a cache the values include past tokens, fewer of them on sliding layers; the new ones are the last.
        new, first_new = call.keys - call.queries, first.shape[2] - call.queries
        return call.value(self, "strength") * (first[:, :, first_new:] - call.v[:, :, new:])

    def output(self, o: Tensor, call: Call) -> Tensor:
        return o if call.ahead is None else o + call.ahead
