"""Modules of nn.MultiheadAttention with weights far from 0, and every way to call them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

C, H, B, T, N = 16, 4, 3, 5, 7
KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 12, "vdim": 8},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "both extras": {"add_bias_kv": True, "add_zero_attn": True},
}
LAYOUTS = ("batch first", "tokens first", "unbatched")
SOURCES = ("self", "keys apart", "values apart")
MASKS = ("none", "bool", "float", "bool heads", "float heads", "causal hint")
PADDINGS = ("none", "bool", "float")


@dataclass
class Case:
    """One module and one call of it."""

    module: nn.MultiheadAttention
    inputs: tuple[Tensor, Tensor, Tensor]
    settings: dict[str, Any]

    def __call__(self, seed: int = 1, **more: Any) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(seed)
        return self.module(*self.inputs, **{**self.settings, **more})


def case(
    kind: str = "packed", layout: str = "batch first", source: str = "self", mask="none", padding="none", dropout=0.0
) -> Case:
    """Make a module with weights far from 0 and the arguments of one call."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(C, H, dropout=dropout, batch_first=layout == "batch first", **KINDS[kind])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    one, apart = layout == "unbatched", source == "keys apart"
    batch, keys = 1 if one else B, N if apart else T

    def tokens(count: int, size: int) -> Tensor:
        x = torch.randn(B, count, size)
        return x[0] if one else x if layout == "batch first" else x.transpose(0, 1).contiguous()

    q = tokens(T, C)
    k = q if source == "self" else tokens(keys, module.kdim)
    v = k if source != "values apart" and module.kdim == module.vdim else tokens(keys, module.vdim)
    settings: dict[str, Any] = {"need_weights": False}
    if mask == "causal hint":
        settings.update(attn_mask=torch.ones(T, keys, dtype=torch.bool).triu(1), is_causal=True)
    elif mask != "none":
        shape = (batch * H, T, keys) if "heads" in mask else (T, keys)
        settings["attn_mask"] = (
            torch.randn(shape) if "float" in mask else (torch.rand(shape) < 0.3).index_fill(-1, torch.tensor(0), False)
        )
    if padding != "none":
        missing = torch.arange(keys) >= torch.tensor([keys, 3, keys - 1][:batch])[:, None]
        missing = missing if padding == "bool" else torch.zeros(missing.shape).masked_fill(missing, -1e9)
        settings["key_padding_mask"] = missing[0] if one else missing
    return Case(module, (q, k, v), settings)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two results are the same bits in the same layout."""
    return a is b if a is None or b is None else torch.equal(a, b) and a.stride() == b.stride()


def close(a: Tensor, b: Tensor) -> bool:
    """Tell whether two results agree to 1e-6 of fp32."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-6)


def calls(kind: str) -> Iterator[tuple[str, str, str, str]]:
    """Walk the ways to call a kind of module."""
    for layout, source, mask, padding in itertools.product(LAYOUTS, SOURCES, MASKS, PADDINGS):
        mixed = {mask.split()[0], padding} == {"bool", "float"} or (mask == "causal hint" and padding == "float")
        if not mixed and (kind != "kdim" or source == "keys apart"):
            yield layout, source, mask, padding


class Pair(nn.Module):
    """Two attention layers, the second of which can carry values of the first."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.MultiheadAttention(C, H, batch_first=True, **settings) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, **settings: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        y = self.layers[0](x, x, x, **settings)[0]
        return y, *self.layers[1](y, y, y, **settings)
