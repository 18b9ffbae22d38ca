"""InputNoise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attend import projections
from headwise.attend.core import Call, Method, MethodState, Site, random_draws
from headwise.numerics.medians import row_medians


class InputNoise(Method):
    """Adds normal noise to the input of the attention layer.

    Meindl 2023, "Regularization Techniques for Attention Layers in Transformer Models" (a blog).

    x + scale·level(x)·N(0, 1) while training. The level is the median as in the blog, the standard deviation, or the
    median absolute deviation, over the tokens and channels of each sample, or with `over="batch"` over the whole
    tensor, the literal meaning of the blog's `median(x)`; known padding does not count. The median of a layer-normed
    sample is about 1e-2 in size (over a whole batch 1e-4 to 1e-2), so the blog's noise is about 1e-4 of the input's
    deviation: for more use "std" or "mad". `per_head=True` gives each head its own noise: (x + n_h)·W_h = x·W_h +
    n_h·W_h, one head at a time, redrawn in backward and never stored. It needs plain projections, so rotary positions
    and query-key norms are refused. On cross attention only the queries get noise, with and without `per_head`.
    """

    scale: float = 0.01
    unit: str = "median"
    per_head: bool = False
    over: str = "sample"

    neutral = {"scale": 0.0}
    strong = {"scale": 1.0, "unit": "std"}
    live = ("scale",)
    random = True

    def check(self) -> None:
        self.require(self.scale >= 0, f"scale must be at least 0, got {self.scale}")
        self.choose("unit", "median", "std", "mad")
        self.choose("over", "sample", "batch")

    def refuse(self, site: Site) -> str | None:
        if not self.per_head:
            return None
        if site.rope:
            return "adds noise to projections, and here rotary positions follow them; use per_head=False"
        if site.qk_norm:
            return "adds noise to projections, and here a norm follows them; use per_head=False"
        return (
            "adds noise for each token of the layer's input, and this layer sees windows; use per_head=False"
            if site.windowed
            else None
        )

    def build(self, site: Site, state: MethodState) -> None:
        if self.per_head:
            projections.of(site).need("q" if site.is_cross else "qkv", repr(self))

    def hidden(self, x: Tensor, call: Call) -> Tensor:
        if self.per_head:
            return x
        return x + call.noise(self, x, call.value(self, "scale") * self._level(x, call.tokens))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        if not self.per_head:
            return q, k, v
        x = call.hidden
        if x is None or x.shape[:2] != (q.shape[0], q.shape[2]):
            shape = None if x is None else tuple(x.shape)
            raise ValueError(
                f"{self!r} needs the layer's input (B, T, C) at {call.site.name}, got {shape}; use per_head=False"
            )
        projected = (q,) if call.site.is_cross else (q, k, v)
        noisy = self._per_head(x, projected, call)
        return noisy if len(noisy) == 3 else (noisy[0], k, v)

    def _per_head(self, x: Tensor, projected: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
        layer = projections.of(call.site)
        # `build` has checked that none of them is None.
        parts = [block for block in (layer.q, layer.k, layer.v)[: len(projected)] if block is not None]
        blocks = [(block.by_head(x.dtype), block.bias()) for block in parts]
        factors = [_factor(x, tensor, weight, bias, call) for tensor, (weight, bias) in zip(projected, blocks)]
        level = call.value(self, "scale") * self._level(x, call.tokens)
        sizes = [weight.shape[1] for weight, _ in blocks]
        key = torch.as_tensor(call.draw_key(), device=x.device)
        noise: list[tuple[Tensor, ...]] = []
        for head in range(call.heads):
            # Grouped keys and values have been repeated: the copy of each query head gets that head's noise.
            rows = [weight[head * weight.shape[0] // call.heads] for weight, _ in blocks]
            salt = call.salt(self, f"head {head}")
            noise.append(_HeadNoise.apply(torch.cat(rows), level, key, salt, tuple(x.shape)).split(sizes, dim=-1))
        stacked = (torch.stack(part, dim=1) for part in zip(*noise))
        return tuple(
            tensor + (factor * part).to(tensor.dtype) for tensor, factor, part in zip(projected, factors, stacked)
        )

    def _level(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        if tokens is None and self.unit != "std":
            rows = x.detach().flatten().unsqueeze(0) if self.over == "batch" else x.detach().flatten(1)
            level = row_medians(rows)
            level = row_medians(rows, level) if self.unit == "mad" else level
            return level.view(-1, *[1] * (x.dim() - 1))
        flat = x.detach().float()
        if tokens is not None:
            # Padding may hold any value and is not part of a sample.
            flat = flat.masked_fill(~tokens.unsqueeze(-1), float("nan"))
        flat = flat.flatten().unsqueeze(0) if self.over == "batch" else flat.flatten(1)
        if self.unit == "std":
            level = flat.std(1, correction=0) if tokens is None else _deviation(flat)
        else:
            level = flat.nanmedian(1).values
            if self.unit == "mad":
                level = (flat - level[:, None]).abs().nanmedian(1).values
        if tokens is not None:
            level = level.nan_to_num(0.0)
        return level.view(-1, *[1] * (x.dim() - 1))


def _deviation(flat: Tensor) -> Tensor:
    """Return the standard deviation of the numbers in each row that are not nan."""
    return (flat - flat.nanmean(1, keepdim=True)).square().nanmean(1).sqrt()


class _HeadNoise(torch.autograd.Function):
    """noise · weightᵀ of one head, (B, T, D), with the noise redrawn in backward."""

    @staticmethod
    def forward(weight: Tensor, level: Tensor, key: Tensor, salt: int, shape: tuple[int, ...]) -> Tensor:
        return _noise(level, key, salt, shape).to(weight.dtype) @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, level, key, salt, shape = inputs
        ctx.save_for_backward(level, key)
        ctx.salt, ctx.shape, ctx.dtype = salt, shape, weight.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        level, key = ctx.saved_tensors
        noise = _noise(level, key, ctx.salt, ctx.shape).to(ctx.dtype)
        return grad.to(ctx.dtype).flatten(0, 1).t() @ noise.flatten(0, 1), None, None, None, None


def _noise(level: Tensor, key: Tensor, salt: int, shape: tuple[int, ...]) -> Tensor:
    return level * random_draws.normal(key, salt, shape, level.device)


@torch.no_grad()
def _factor(x: Tensor, projected: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Return the factor by which a host scales x·Wᵀ + b to get `projected` (OPT and Whisper scale their queries)."""
    # One token suffices: the last of the first sample, or with packing, where the last may be padding, the first.
    position = -1 if call.packed is None else 0
    expected = (weight.flatten(0, 1) @ x[0, position].to(weight.dtype)).float()
    if bias is not None:
        expected = expected + bias.float()
    expected = expected.unflatten(0, weight.shape[:2]).repeat_interleave(call.heads // weight.shape[0], dim=0)
    actual = projected[0, :, position].float()
    # Least squares; the clamp is for a token of zeros.
    factor = (actual * expected).sum() / expected.square().sum().clamp(min=1e-20)
    # Rounding in bfloat16 is far below a twentieth, the effect of a rotation or a norm above.
    if not torch.compiler.is_compiling() and float((actual - factor * expected).norm()) > 0.05 * float(actual.norm()):
        raise ValueError(
            f"InputNoise(per_head=True) cannot add its noise at {call.site.name}: queries, keys or values there are no "
            "multiple of the projection of the layer's input; use per_head=False"
        )
    return factor
