"""AttentionSink."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, Method, MethodState, Site


class AttentionSink(Method):
    """Gives every query one more key, with a logit per head and without a value, so that a head may attend to nothing.

    The learned sink of gpt-oss (OpenAI 2025); with `learned=False` and logit 0 the off-by-one softmax (Miller 2023).

    out·σ(L - b) with L the log-sum-exp of the query's logits and b the sink's logit, in training and evaluation; exact
    without the matrix. `logit` is the initial b: the lower it is, the less a trained model changes at first. Hosts with
    their own sinks are refused.
    """

    logit: float = 0.0
    learned: bool = True

    no_neutral = "a sink of any finite logit takes weight from the keys"
    strong = {"logit": 2.0}
    acts = "both"
    learns = True
    shapes = ("heads",)

    def check(self) -> None:
        self.require(abs(self.logit) < float("inf"), f"logit must be finite, got {self.logit}")

    def has_parameters(self) -> bool:
        return self.learned

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads is not None  # the plan refuses sites without what `shapes` names
        if self.learned:
            state.parameter("logit", torch.full((site.heads,), self.logit, dtype=torch.float32))
        else:
            state.fill("logit", site.heads, self.logit)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        if call.sinks is not None:
            raise ValueError(f"AttentionSink: {call.site.name} has its own sinks; leave it out with where=")
        call.sinks = call.state(self).tensor("logit")
        return q, k, v
