"""How long `regularize` takes with each method: 24 layers of width 1,024 of an own model with fused projections.

python benchmarks/fits.py                  # every method
python benchmarks/fits.py SpectralNorm QKClip
python benchmarks/fits.py --dry-run        # two narrow layers: tests that it runs, measures nothing
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from timing import machine
from torch import Tensor, nn

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY


class Attention(nn.Module):
    """Self attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A residual attention layer after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="by default all")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    layers, width = (2, 32) if options.dry_run else (24, 1024)
    print(f"{machine(torch.get_num_threads())}; {layers} layers of width {width}; seconds")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, 16) for _ in range(layers)))
    example = torch.randn(1, 4, width)
    for name in options.methods or shelf.__all__:
        fitted = copy.deepcopy(model)
        start = time.perf_counter()
        headwise.regularize(fitted, REGISTRY[name](), example=example)
        print(f"{name:22} {time.perf_counter() - start:.2f}", flush=True)


if __name__ == "__main__":
    main()
