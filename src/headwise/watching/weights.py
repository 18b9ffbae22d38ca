"""The weights of the watched sites and the matrices of a whole model: found once, read without disturbing it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from headwise import projections
from headwise.core.call import Call
from headwise.core.precision import at_least_fp32
from headwise.core.settings import suggest
from headwise.core.site import Site
from headwise.projections import ProjectionError, Projections
from headwise.projections.adapted import effective, is_adapted, obstacle
from headwise.projections.block import Block
from headwise.projections.leaves import Leaf, leaves
from headwise.projections.sharded import sharded
from headwise.statistics import STATISTICS
from headwise.statistics.curvature import lanczos
from headwise.statistics.entropy import largest_eigenvalue
from headwise.statistics.weights import WEIGHT_STATISTICS, read_weights, weight_reading, weight_reasons

# The statistic of activations that needs the query and key weights as well.
FLOOR = "entropy_floor_spectral"
PRODUCTS = ("qk", "vo")
NOT_FINITE = "the weights are not finite"
WEIGHT_NAMES = tuple(f"{name}_{product}" for name in WEIGHT_STATISTICS for product in PRODUCTS)


class Weights:
    """Reads the figures of a site's weights, and the size of its product of queries and keys."""

    def __init__(self, names: list[str]) -> None:
        self.names = [name for name in names if name in WEIGHT_NAMES]
        self._wanted = bool(self.names) or FLOOR in names
        self._found: dict[Site, Projections | str] = {}

    def look(self, model: nn.Module, sites: list[Site]) -> None:
        """Find the projections of the sites of a model, or keep the reason why they cannot be told."""
        if not self._wanted:
            return
        with still(model):
            for site in sites:
                try:
                    self._found[site] = projections.of(site)
                except (ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                    self._found[site] = str(error).splitlines()[0] + _sharded(site)

    def figures(self, site: Site) -> tuple[dict[str, Tensor], dict[str, str], Tensor | None]:
        """Return the figures (H,) or (G,) of a site's weights as they are now, why others are missing, and whether all
        are finite.

        The last is a 0-d flag on the weights' device, None where there is nothing to be finite: to look at it here
        would wait for the device.
        """
        found = self._found.get(site, "its weights were not looked for")
        if isinstance(found, str):
            return {}, dict.fromkeys(self.names, found), None
        # Adapters may have come or gone since.
        projections.of(site)
        with still(*(block.module for block in found.blocks)):
            reading = weight_reading(site, found)
            parts = [part for product in reading.products.values() for part in (product.own, product.shared)]
            finite = torch.stack([part.isfinite().all() for part in parts]).all() if parts else None
            figures, reasons = read_weights(reading), weight_reasons(reading)
        chosen = {name: figures[name] for name in self.names if name in figures}
        return chosen, {name: reasons[name] for name in self.names if name in reasons}, finite

    def product_norms(self, call: Call) -> Tensor | str | None:
        """Return ‖W_KᵀW_Q‖₂ of each head (H,), where it alone makes the logits of a call, or why it does not."""
        found, site = self._found.get(call.site), call.site
        if found is None or isinstance(found, str) or site.rope or site.qk_norm or site.is_cross:
            return found if isinstance(found, str) else None
        q, k = found.q, found.k
        if found.context is not None:
            return "image and text tokens have query and key weights of their own"
        if q is None or k is None:
            return "; ".join(found.missing.values()) or "the query and key weights were not found"
        if q.convolved or k.convolved:
            return f"queries or keys are made by {q.convolved or k.convolved}"
        if reason := q.unreadable() or k.unreadable():
            return reason
        if q.bias() is not None or k.bias() is not None or k.along:
            return "a bias is added to queries or keys"
        with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False), still(q.module, k.module):
            return spectral_norms(q.by_head(), k.by_head())


def _sharded(site: Site) -> str:
    if any(hasattr(parameter, "full_tensor") for parameter in site.module.parameters()):
        return ". Its weights are sharded: call headwise.watch before fully_shard"
    return ""


@contextmanager
def still(*modules: nn.Module) -> Iterator[None]:
    """Keep parametrizations from changing their state while weights are read, as torch's spectral norm does in
    training."""
    owners = (part for module in modules for part in module.modules() if parametrize.is_parametrized(part))
    # As a child: the attribute of a module may be a tensor for all that a type checker knows.
    lists = (owner.get_submodule("parametrizations") for owner in owners)
    modes = {part: part.training for one in lists for part in one.modules()}
    try:
        for part in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def spectral_norms(queries: Tensor, keys: Tensor) -> Tensor:
    """Return ‖W_KᵀW_Q‖₂ of each query head from (H, d, C) and (Hkv, d, C), with d×d matrices alone."""
    queries, keys = queries.detach(), keys.detach()
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    grams = [queries @ queries.mT, keys @ keys.mT]
    finite = torch.stack([gram.isfinite().all(-1).all(-1) for gram in grams]).all(0)
    query, key = (torch.where(finite[:, None, None], gram, 0.0) for gram in grams)
    values, vectors = torch.linalg.eigh(query)
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    return torch.where(finite, largest_eigenvalue(root.mT @ key @ root).clamp_min(0).sqrt(), torch.nan)


def known_names(names: list[str] | None, beside: tuple[str, ...] = ()) -> list[str]:
    """Check the names of statistics, of activations or weights, or of those `beside`; None for all but those.

    Raises:
        ValueError: naming the unknown one and the nearest known one.
    """
    usual = [*STATISTICS, *WEIGHT_NAMES]
    known = [*usual, *beside]
    for name in names or ():
        if name not in known:
            raise ValueError(f"There is no statistic {name!r}.{suggest(name, known)} Statistics: {', '.join(known)}.")
    return usual if names is None else list(dict.fromkeys(names))


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
    def norms(self) -> dict[Matrix, Tensor]:
        """Return what `norm_in` finds the spectral norm of each matrix in, where the matrix lies: no device is waited
        for. `missing` says why others cannot be read."""
        norms = {}
        for one in self.found:
            if reason := one.unreadable():
                self.missing[one.name] = reason
                continue
            with still(one.part.module), torch.autocast(next(self.model.parameters()).device.type, enabled=False):
                norms[one] = gram_coefficients(one.weight())
        return norms


# Products of AᵀA, of which a device makes all, and the relative error at which a CPU ends: 63 find the norm of a
# 2048 x 2048 matrix of independent numbers to eight digits.
STEPS, TOLERANCE = 100, 1e-6


def gram_coefficients(matrix: Tensor) -> Tensor:
    """Return the coefficients of Lanczos on AᵀA or AAᵀ, the smaller one, below a row with the scale of A."""
    matrix = at_least_fp32(matrix.detach())
    matrix = matrix.t() if matrix.shape[0] < matrix.shape[1] else matrix
    # squares of a scaled matrix stay in the range of fp32
    scale = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    drawn = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0))
    start = drawn.to(matrix.device, matrix.dtype, non_blocking=True)

    def product(vector: Tensor) -> Tensor:
        return matrix.t() @ (matrix @ (vector / scale) / scale)

    rows = lanczos.coefficients(product, start, min(STEPS, 2 * len(start)), TOLERANCE, STEPS)
    return torch.cat([scale.expand(1, rows.shape[1]), rows])


def norm_in(rows: Tensor) -> float:
    """Return the largest singular value of the matrix with these coefficients, brought to the CPU; NaN where it is not
    finite, as in a training that diverged."""
    return float(rows[0, 0]) * math.sqrt(max(lanczos.read(rows[1:], TOLERANCE).value, 0.0))


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
