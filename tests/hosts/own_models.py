"""Attention models of one's own, in the ways in which people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Stacked(nn.Module):
    """One stacked projection around a call that subclasses make."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-2, -3).unbind(0)

    def join(self, o: Tensor) -> Tensor:
        return self.proj(o.transpose(-2, -3).flatten(-2))


class SelfAttention(Stacked):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class CausalAttention(Stacked):
    """As in nanoGPT."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True))


class ImportedByName(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(scaled_dot_product_attention(*self.split(x)))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class ByAFunction(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(attend(*self.split(x)))


class Kernel(nn.Module):
    """Only calls the function; the layer around it holds the weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ByAModule(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel()

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.kernel(*self.split(x)))


class ByAModuleAttention(ByAModule):
    pass


class TwoCalls(Stacked):
    """Differential attention: the second map is taken from the first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(F.scaled_dot_product_attention(q, k, v) - 0.5 * F.scaled_dot_product_attention(k, q, v))


class HeadsInTheBatch(Stacked):
    """Folds heads into the batch, as before there was a fused function."""

    order = "samples first"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        b, h = q.shape[:2]
        if self.order == "samples first":
            return self.join(F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (b, h)))
        folded = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        return self.join(F.scaled_dot_product_attention(*folded).unflatten(0, (h, b)).transpose(0, 1))


class InGroups(Stacked):
    """Attends in windows of four tokens that the rows of the call hold."""

    def __init__(self, order: str = "samples first") -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        cut = x.reshape(b, t // 4, 4, c)
        cut = cut if self.order == "samples first" else cut.transpose(0, 1)
        rows = cut.flatten(0, 1)
        if self.order == "shuffled":
            rows = rows.roll(1, dims=0)
        out = self.join(F.scaled_dot_product_attention(*self.split(rows)))
        if self.order == "shuffled":
            out = out.roll(-1, dims=0)
        out = out.unflatten(0, cut.shape[:2])
        return (out if self.order == "samples first" else out.transpose(0, 1)).reshape(b, t, c)


class GroupsOfTheirOwn(Stacked):
    """Keeps windows in a dimension of their own: (B, windows, H, T, D) or, with heads first, (B, H, windows, T, D)."""

    def __init__(self, heads_first: bool = False, heads: int = 4) -> None:
        super().__init__(heads=heads)
        self.heads_first = heads_first

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x.unflatten(1, (-1, 4)))
        if not self.heads_first:
            return self.join(F.scaled_dot_product_attention(q, k, v)).flatten(1, 2)
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.join(o.transpose(1, 2)).flatten(1, 2)


class SequenceFirst(nn.Module):
    """Takes (T, B, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = SelfAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.transpose(0, 1)).transpose(0, 1)


class CrossAttention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(context).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Layers one after the other, each with its residual."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Shared(nn.Module):
    """One layer that runs several times, as in ALBERT."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.layer, self.times = SelfAttention(), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.layer(x)
        return x


def stack(kind: type[nn.Module] = SelfAttention, depth: int = 2, **settings: object) -> Stack:
    """Make a stack of layers of one kind, the same weights every time."""
    torch.manual_seed(0)
    return Stack(*(kind(**settings) for _ in range(depth)))


def tokens(batch: int = 3, length: int = 8, seed: int = 5) -> Tensor:
    """Draw a batch of token vectors (B, T, 16)."""
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(seed))
