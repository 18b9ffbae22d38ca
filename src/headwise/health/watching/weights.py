"""Readers for the weights of the watched sites and for the matrices of a whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.attend import Call, Site, projections
from headwise.attend.projections import Block, Leaf, ProjectionError, Projections, effective, is_adapted, still
from headwise.borders import Convolution
from headwise.files.errors import suggest
from headwise.health.statistics import STATISTICS, lanczos, usual
from headwise.health.statistics.entropy import largest_eigenvalue
from headwise.health.statistics.squarings import largest_product
from headwise.health.statistics.weights import (
    WEIGHT_STATISTICS,
    Grams,
    grams_of,
    read_together,
    weight_reading,
    weight_reasons,
)
from headwise.numerics.precision import at_least_fp32, magnitude

# The statistic of activations that also needs the query and key weights.
FLOOR = "entropy_floor_spectral"
PRODUCTS = ("qk", "vo")
NOT_FINITE = "the weights are not finite"
WEIGHT_NAMES = tuple(f"{name}_{product}" for name in WEIGHT_STATISTICS for product in PRODUCTS)


class Weights:
    """Reader of the weight statistics of a site, and of the norm of its product of query and key weights."""

    def __init__(self, names: list[str]) -> None:
        self.names = [name for name in names if name in WEIGHT_NAMES]
        self._wanted = bool(self.names) or FLOOR in names
        self._projections: dict[Site, Projections | str] = {}

    def look(self, model: nn.Module, sites: list[Site]) -> None:
        """Find the projections of a model's sites, or the reasons why they cannot be found."""
        if not self._wanted:
            return
        with still(model):
            for site in sites:
                try:
                    self._projections[site] = projections.of(site)
                except (ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                    self._projections[site] = str(error).splitlines()[0] + _sharded(site)

    def grams(self, site: Site) -> tuple[dict[str, Grams], dict[str, str]]:
        """Return what the figures of a site's current weights are computed from, and the reasons for missing figures.

        Nothing waits for the device here.
        """
        site_projections = self._projections.get(site, "its weights were not looked up")
        if isinstance(site_projections, str):
            return {}, dict.fromkeys(self.names, site_projections)
        try:
            # Rebinds the projections to adapters that were added or removed since.
            projections.of(site)
        except ProjectionError as error:
            return {}, dict.fromkeys(self.names, str(error))
        with still(*(block.module for block in site_projections.blocks)):
            reading = weight_reading(site, site_projections)
            grams, reasons = grams_of(reading), weight_reasons(reading)
        return grams, {name: reasons[name] for name in self.names if name in reasons}

    def figures(self, sites: dict[int, dict[str, Grams]]) -> tuple[dict[int, dict[str, Tensor]], dict[int, Tensor]]:
        """Return the figures (H,) or (G,) of sites by name, and whether all weights of each are finite (0-d)."""
        return read_together(sites, self.names, WEIGHT_STATISTICS)

    def product_norms(self, call: Call) -> Tensor | str | None:
        """Return ‖W_KᵀW_Q‖₂ of each head (H,), or the reason why this product alone does not determine the logits.

        None, without a reason, for sites with rotary positions, normalised queries and keys, or cross attention.
        """
        parts, site = self._projections.get(call.site), call.site
        if parts is None or isinstance(parts, str) or site.rope or site.qk_norm or site.is_cross:
            return parts if isinstance(parts, str) else None
        q, k = parts.q, parts.k
        if parts.context is not None:
            return "image and text tokens have separate query and key weights"
        if q is None or k is None:
            return "; ".join(parts.missing.values()) or "the query and key weights were not found"
        if q.convolved or k.convolved:
            return f"queries or keys are computed by {q.convolved or k.convolved}"
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


def spectral_norms(queries: Tensor, keys: Tensor) -> Tensor:
    """Return ‖W_KᵀW_Q‖₂ of each query head from (H, d, C) and (Hkv, d, C), computed with d×d matrices only."""
    queries, keys = at_least_fp32(queries.detach()), at_least_fp32(keys.detach())
    units = [magnitude(x, (1, 2)) for x in (queries, keys)]
    queries, keys = queries / units[0], keys / units[1]
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    grams = [queries @ queries.mT, keys @ keys.mT]
    own, shared = (unit.flatten() for unit in units)
    size = own * shared.repeat_interleave(len(own) // len(shared))
    if queries.device.type == "cuda":
        return largest_product(*grams) * size
    finite = torch.stack([gram.isfinite().all(-1).all(-1) for gram in grams]).all(0)
    query, key = (torch.where(finite[:, None, None], gram, 0.0) for gram in grams)
    values, vectors = torch.linalg.eigh(query)
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    norms = largest_eigenvalue(root.mT @ key @ root).clamp_min(0).sqrt()
    return torch.where(finite, norms * size, torch.nan)


def known_names(names: list[str] | None, beside: tuple[str, ...] = ()) -> list[str]:
    """Return the names without duplicates after checking them; for None, the usual statistics of activations and those
    of weights.

    Args:
        beside: further valid names, which None does not include.

    Raises:
        ValueError: if a name is unknown, with the nearest known one.
    """
    known = [*STATISTICS, *WEIGHT_NAMES, *beside]
    for name in names or ():
        if name not in known:
            raise ValueError(f"There is no statistic {name!r}.{suggest(name, known)} Statistics: {', '.join(known)}.")
    return [*usual(), *WEIGHT_NAMES] if names is None else list(dict.fromkeys(names))


# The depth of modules outside all blocks, such as a patch embedding or a head.
OUTSIDE = -1


@dataclass(frozen=True)
class Matrix:
    """Matrix of a model: a q, k, v or o block of an attention layer, or the weight of another layer or convolution."""

    name: str
    depth: int
    part: Block | Leaf

    def unreadable(self) -> str:
        """Return why the matrix cannot be read, as the end of a sentence; empty if it can."""
        if isinstance(self.part, Block) and self.part.grouped:
            return "is a convolution in groups, which is not a matrix"
        reason = self.part.unreadable()
        in_shards = any(hasattr(p, "full_tensor") for p in self.part.module.parameters())
        return reason or ("is sharded over processes" if in_shards else "")

    def weight(self) -> Tensor:
        """Return the matrix as (outputs, inputs x kernel), or its transpose, which has the same norm."""
        if isinstance(self.part, Block):
            return self.part.weight()
        module = self.part.module
        return (effective(module, "weight") if is_adapted(module) else self.part.weight).flatten(1)


class Matrices:
    """Matrices of a model's linear layers and convolutions, with separate q, k and v blocks; no embeddings."""

    def __init__(self, model: nn.Module, sites: list[Site]) -> None:
        self.model = model
        self.missing: dict[str, str] = {}
        self.found = list(self._attention(sites))
        own = {id(m.part.module) for m in self.found}
        self.found += [
            Matrix(leaf.name, _depth(leaf.name, sites), leaf)
            for leaf in Leaf.below(model, "")
            if id(leaf.module) not in own and (isinstance(leaf.module, nn.Linear | Convolution) or leaf.transposed)
        ]

    def _attention(self, sites: list[Site]) -> Iterator[Matrix]:
        with still(self.model):
            for site in sites:
                try:
                    blocks = projections.of(site).blocks
                except (ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError):
                    # Its linear layers are then read whole, like all others.
                    continue
                yield from (Matrix(f"{block.maker} {block.kind}", site.depth, block) for block in blocks)

    @torch.no_grad()
    def norms(self) -> dict[Matrix, Tensor]:
        """Return for each matrix the coefficients from which `norm_in` computes its spectral norm.

        They are on the device of the matrix, and nothing waits for it. `missing` gets the reasons for the matrices that
        cannot be read.
        """
        norms = {}
        for matrix in self.found:
            if reason := matrix.unreadable():
                self.missing[matrix.name] = reason
                continue
            with still(matrix.part.module), torch.autocast(next(self.model.parameters()).device.type, enabled=False):
                norms[matrix] = gram_coefficients(matrix.weight())
        return norms


# The number of products with AᵀA, all of which an accelerator computes, and the relative error at which a CPU stops: 63
# products give the norm of a 2048 x 2048 matrix of independent numbers to eight digits.
STEPS, TOLERANCE = 100, 1e-6


def gram_coefficients(matrix: Tensor) -> Tensor:
    """Return the Lanczos coefficients of AᵀA or AAᵀ, whichever is smaller, below a first row with the scale of A."""
    matrix = at_least_fp32(matrix.detach())
    matrix = matrix.t() if matrix.shape[0] < matrix.shape[1] else matrix
    # The squares of a scaled matrix stay within the range of fp32.
    scale = magnitude(matrix, (0, 1)).flatten()
    matrix = matrix / scale
    drawn = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0))
    start = drawn.to(matrix.device, matrix.dtype, non_blocking=True)

    def product(vector: Tensor) -> Tensor:
        return matrix.t() @ (matrix @ vector)

    rows = lanczos.coefficients(product, start, min(STEPS, 2 * len(start)), TOLERANCE, STEPS)
    return torch.cat([scale.expand(1, rows.shape[1]), rows])


def norm_in(rows: Tensor) -> float:
    """Return the largest singular value of the matrix with these coefficients; NaN if it is not finite."""
    return float(rows[0, 0]) * math.sqrt(max(lanczos.read(rows[1:], TOLERANCE).value, 0.0))


def _depth(name: str, sites: list[Site]) -> int:
    """Return the depth of the attention layer whose name shares the longest prefix of modules with this name.

    It is `OUTSIDE` if no layer shares any, or if layers of several depths share the longest one.
    """
    parts = name.split(".")
    best, depth = 0, OUTSIDE
    for site in sites:
        site_parts = site.name.split(".")
        shared = next(
            (i for i, (a, b) in enumerate(zip(parts, site_parts, strict=False)) if a != b),
            min(len(parts), len(site_parts)),
        )
        if shared > best:
            best, depth = shared, site.depth
        elif shared == best and site.depth != depth:
            # A prefix that several layers share is not the block of one of them.
            depth = OUTSIDE
    return depth
