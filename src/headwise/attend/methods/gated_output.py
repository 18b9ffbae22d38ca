"""GatedOutput."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.attend.attention.gates import gated
from headwise.attend.attention.low_rank_gates import low_rank_gated, with_inner
from headwise.attend.core import Call, Method, MethodState, Site
from headwise.attend.methods.gates import STARTS, drawn, factor_of
from headwise.attend.methods.layer_input import JOINT, tokens_of_queries
from headwise.files.arguments import is_a


class GatedOutput(Method):
    """Multiplies the output of each head by a learned sigmoid gate of the layer's input, of that output, or of both.

    Qiu et al. 2025, arXiv 2505.06708; from the output, and of low rank, Zhou et al. 2026, arXiv 2608.11805.

    out⊙σ(x·W + b) before the output projection, in training and evaluation, with x the layer's input; one gate per
    head, or with `per="element"` one per channel of a head. W starts at 0, and `start` determines the initial gate:
    "open" has b = 4, so that every gate starts at 0.982 and a trained model hardly changes (the paper trains from
    scratch and starts near ½); "half" is σ(x·W) without b, at ½; "one" is 2σ(x·W), at exactly 1, so that a trained
    model does not change at first, and gates may reach 2. With `channels` the gate reads only the first channels of the
    input: 12 of them with "half" are the sparse gate of pull request 117 of KellerJordan/modded-nanogpt (2025).
    `source="output"` reads each head's own output instead of x, and "both" adds the two before the sigmoid. With `rank`
    each of them is U·silu(D·x), with U and D of that rank for each head; U starts at 0, and D at random. "both" with
    `per="element"`, `start="half"` and a rank of 16 to 192 are the gates of 2608.11805, but for its third, which reads
    all heads; its sink is `AttentionSink`.
    """

    per: str = "head"
    start: str = "open"
    channels: int | None = None
    source: str = "input"
    rank: int | None = None

    neutral = {"start": "one"}
    acts = "both"
    learns = True

    def check(self) -> None:
        self.choose("per", "head", "element")
        self.choose("start", *STARTS)
        self.choose("source", "input", "output", "both")
        for name in ("channels", "rank"):
            value = getattr(self, name)
            is_a(name, value, (int, type(None)), "a whole number or None")
            self.require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
        self.require(
            self.channels is None or self.source != "output",
            f'channels={self.channels} are of the layer\'s input, which source="output" does not read',
        )

    def refuse(self, site: Site) -> str | None:
        if self.source == "output":
            return None
        if site.joint:
            return JOINT
        if self.channels is None or site.hidden is None or self.channels <= site.hidden:
            return None
        return f"reads the first {self.channels} channels of its input, and this layer's has {site.hidden}"

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads and site.head_dim and site.hidden  # the plan refuses sites without what `shapes` names
        size = site.value_dim or site.head_dim
        gates = size if self.per == "element" else 1
        read = {"": self.channels or site.hidden, "output_": size}
        for name in self._beginnings():
            if self.rank is None:
                state.parameter(f"{name}weight", torch.zeros(site.heads * gates, read[name], dtype=torch.float32))
                continue
            shape = site.heads * self.rank, read[name]
            state.parameter(f"{name}down", drawn(shape, state.seed, f"GatedOutput {name}", site.index))
            state.parameter(f"{name}up", torch.zeros(site.heads, self.rank, gates, dtype=torch.float32))
        if self.start == "open":
            state.parameter("bias", torch.full((site.heads * gates,), 4.0, dtype=torch.float32))

    def _beginnings(self) -> tuple[str, ...]:
        """Return how the names of the parameters for each source begin."""
        return {"input": ("",), "output": ("output_",), "both": ("", "output_")}[self.source]

    def output(self, o: Tensor, call: Call) -> Tensor:
        self._check_size(o, call)
        if self.rank is not None and self.per == "element":
            return self._low_rank(o, call)
        parts = [self._of_output(o, call) if name else self._of_input(call) for name in self._beginnings()]
        if call.observed:
            call.gates = torch.sigmoid(sum(parts[1:], parts[0]).detach())
        return gated(o, parts[0], parts[1] if len(parts) > 1 else None, factor_of(self.start))

    def _check_size(self, o: Tensor, call: Call) -> None:
        """Raise ValueError if the heads' output has another size than the gates were made for."""
        state, size = call.state(self), o.shape[-1]
        if self.source != "input":
            size = state.tensor("output_weight" if self.rank is None else "output_down").shape[-1]
        elif self.per == "element":
            size = state.tensor("weight").shape[0] // call.heads if self.rank is None else state.tensor("up").shape[-1]
        if size != o.shape[-1]:
            raise ValueError(
                f"GatedOutput was fitted to {size} channels of a head at {call.site.name}, and its output has "
                f"{o.shape[-1]}: pass example=batch to regularize(), which tells their number"
            )

    def _low_rank(self, o: Tensor, call: Call) -> Tensor:
        """Return o times its gates, one per channel, of low rank."""
        state, dtype = call.state(self), o.dtype
        inner = [] if self.source == "output" else [self._inner_of_input(call)]
        if self.source != "input":
            o, own = with_inner(o, self._down_of_output(o, call))
            inner.append(own)
        up = [state.tensor(f"{name}up").to(dtype) for name in self._beginnings()]
        bias = state.tensor("bias").to(dtype).view(call.heads, -1) if self.start == "open" else None
        if call.observed:
            # the kernel does not write them
            logits = sum((F.silu(i) @ u for i, u in zip(inner[1:], up[1:], strict=True)), F.silu(inner[0]) @ up[0])
            call.gates = torch.sigmoid((logits if bias is None else logits + bias[:, None]).detach())
        return low_rank_gated(o, inner, up, bias, factor_of(self.start))

    def _inner_of_input(self, call: Call) -> Tensor:
        """Return D·x of each head, (B, H, T, rank)."""
        x = tokens_of_queries(self, call)[..., : self.channels]
        found = F.linear(x, call.state(self).tensor("down").to(x.dtype))
        return found.unflatten(-1, (call.heads, -1)).transpose(1, 2)

    def _down_of_output(self, o: Tensor, call: Call) -> Tensor:
        """Return D of each head's own output, (H, rank, Dv)."""
        return call.state(self).tensor("output_down").to(o.dtype).unflatten(0, (call.heads, -1))

    def _of_input(self, call: Call) -> Tensor:
        """Return what the layer's input adds to the numbers before the sigmoid, (B, H, T, 1 or Dv), with the bias."""
        state, x = call.state(self), tokens_of_queries(self, call)[..., : self.channels]
        bias = state.tensor("bias").to(x.dtype) if self.start == "open" else None
        if self.rank is None:
            found = F.linear(x, state.tensor("weight").to(x.dtype), bias)
            return found.unflatten(-1, (call.heads, -1)).transpose(1, 2)
        found = F.silu(self._inner_of_input(call)) @ state.tensor("up").to(x.dtype)
        return found if bias is None else found + bias.view(call.heads, 1, -1)

    def _of_output(self, o: Tensor, call: Call) -> Tensor:
        """Return what the heads' output o adds to them, with the bias if nothing else has one."""
        state = call.state(self)
        if self.rank is None:
            weight = state.tensor("output_weight").to(o.dtype).unflatten(0, (call.heads, -1))
            found = o @ weight.mT
        else:
            found = F.silu(o @ self._down_of_output(o, call).mT) @ state.tensor("output_up").to(o.dtype)
        if self.source == "both" or self.start != "open":
            return found
        return found + state.tensor("bias").to(o.dtype).view(call.heads, 1, -1)
