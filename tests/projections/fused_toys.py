"""Toy attention layers whose fused rows lie in a known order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, SIZE, WIDTH = 4, 8, 24


def stacked(parts: list[Tensor]) -> Tensor:
    """(3, H, d): q of all heads, then k, then v."""
    return torch.cat([p.flatten(0, 1) for p in parts])


def reversed_stack(parts: list[Tensor]) -> Tensor:
    """v, k, q."""
    return stacked(parts[::-1])


def interleaved(parts: list[Tensor]) -> Tensor:
    """(G, q of the group + k + v, d): GPT-NeoX where every head has its own keys, Falcon where not."""
    q, k, v = parts
    groups = len(k)
    return torch.cat([q.unflatten(0, (groups, -1)), k[:, None], v[:, None]], dim=1).flatten(0, 2)


def entries_first(parts: list[Tensor]) -> Tensor:
    """(d, 3, H)."""
    return torch.stack(parts).permute(2, 0, 1, *range(3, torch.stack(parts).dim())).flatten(0, 2)


def heads_then_entries(parts: list[Tensor]) -> Tensor:
    """(H, d, 3)."""
    return torch.stack(parts).permute(1, 2, 0, *range(3, torch.stack(parts).dim())).flatten(0, 2)


def shuffled(parts: list[Tensor]) -> Tensor:
    """No order at all."""
    rows = stacked(parts)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))]


class FusedToy(nn.Module):
    """Attention with one fused projection in a given order; `parts` are the weights it was made of."""

    def __init__(self, order, groups: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.groups = HEADS, groups
        g = torch.Generator().manual_seed(0)
        self.parts = [torch.randn(n, SIZE, WIDTH, generator=g) * 0.2 for n in (HEADS, groups, groups)]
        self.biases = [torch.randn(n, SIZE, generator=g) for n in (HEADS, groups, groups)]
        rows = order(self.parts)
        self.mix = nn.Linear(WIDTH, len(rows), bias=bias)
        self.after = nn.Linear(HEADS * SIZE, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        # Where each part's rows went: the same order applied to their numbers.
        count, numbers = 0, []
        for part in self.parts:
            numbers.append(torch.arange(count, count + part[..., 0].numel()).view(len(part), SIZE, 1))
            count += numbers[-1].numel()
        self.inverse = torch.argsort(order(numbers).flatten())
        with torch.no_grad():
            self.mix.weight.copy_(rows)
            if bias:
                self.mix.bias.copy_(order([b.unsqueeze(-1) for b in self.biases]).flatten())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        torch.rand(1)
        rows = F.linear(x, self.mix.weight, self.mix.bias) if getattr(self, "past", False) else self.mix(x)
        y = rows[..., self.inverse]
        q, k, v = y.split([HEADS * SIZE, self.groups * SIZE, self.groups * SIZE], dim=-1)
        q, k, v = (z.unflatten(-1, (-1, SIZE)).transpose(1, 2) for z in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups < HEADS)
        return self.after(o.transpose(1, 2).flatten(2))
