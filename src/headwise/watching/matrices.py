"""The matrices of a whole model: what they are called, which block each belongs to, and how large each is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from headwise import projections
from headwise.core.precision import at_least_fp32
from headwise.core.site import Site
from headwise.projections import ProjectionError
from headwise.projections.adapted import effective, is_adapted, obstacle
from headwise.projections.block import Block
from headwise.projections.leaves import Leaf, leaves
from headwise.projections.sharded import sharded
from headwise.projections.spectral import leading
from headwise.watching.weights import still

# The depth of what stands outside of all blocks: patch embedding, head.
OUTSIDE = -1


@dataclass(frozen=True)
class Matrix:
    """Name one matrix: a q, k, v or o block of an attention layer, or the weight of another linear layer or
    convolution."""

    name: str
    depth: int
    part: Block | Leaf

    def unreadable(self) -> str:
        """Say why its numbers cannot be read as they are, the end of a sentence; else empty."""
        if isinstance(self.part, Block):
            if self.part.grouped:
                return "is a convolution in groups, which is no matrix"
            reason = self.part.unreadable()
        else:
            reason = sharded(self.part.module, "weight") or obstacle(self.part.module)
        in_shards = any(hasattr(p, "full_tensor") for p in self.part.module.parameters())
        return reason or ("is sharded over processes" if in_shards else "")

    def weight(self) -> Tensor:
        """Return it as (outputs, inputs x kernel), or its transpose, which has the same norm."""
        if isinstance(self.part, Block):
            return self.part.weight()
        module = self.part.module
        return (effective(module, "weight") if is_adapted(module) else self.part.weight).flatten(1)


class Matrices:
    """Finds the matrices of linear layers and convolutions of a model, q, k and v blocks each by itself; embeddings are
    none."""

    def __init__(self, model: nn.Module, sites: list[Site]) -> None:
        self.model = model
        self.missing: dict[str, str] = {}
        self.found = list(self._attention(sites))
        own = {id(m.part.module) for m in self.found}
        self.found += [
            Matrix(one.name, _depth(one.name, sites), one)
            for one in leaves(model, "")
            if id(one.module) not in own and (isinstance(one.module, nn.Linear | _ConvNd) or one.transposed)
        ]

    def _attention(self, sites: list[Site]) -> Iterator[Matrix]:
        with still(self.model):
            for site in sites:
                try:
                    blocks = projections.of(site).blocks
                except (ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError):
                    # Its linear layers are read whole, as any other's.
                    continue
                yield from (Matrix(f"{block.maker} {block.kind}", site.depth, block) for block in blocks)

    @torch.no_grad()
    def norms(self) -> dict[Matrix, float]:
        """Return the spectral norm of each matrix that can be read; NaN where one is not finite. `missing` says why
        others are not."""
        norms = {}
        for one in self.found:
            if reason := one.unreadable():
                self.missing[one.name] = reason
                continue
            with still(one.part.module), torch.autocast(next(self.model.parameters()).device.type, enabled=False):
                norms[one] = spectral_norm(one.weight())
        return norms


def spectral_norm(matrix: Tensor) -> float:
    """Return the largest singular value of a matrix; NaN where it is not finite, as in a training that diverged."""
    matrix = at_least_fp32(matrix.detach())
    if not bool(matrix.isfinite().all()):
        return float("nan")
    u, v = leading(matrix)
    return float(torch.dot(u, matrix @ v))


def _depth(name: str, sites: list[Site]) -> int:
    """Return the depth of the attention layer that shares the longest beginning of a name, one block, with it."""
    parts = name.split(".")
    best, depth = 0, OUTSIDE
    for site in sites:
        theirs = site.name.split(".")
        shared = next(
            (i for i, (a, b) in enumerate(zip(parts, theirs, strict=False)) if a != b), min(len(parts), len(theirs))
        )
        if shared > best:
            best, depth = shared, site.depth
        elif shared == best and site.depth != depth:
            # What several layers share is no block of one.
            depth = OUTSIDE
    return depth
