"""The weight statistics of all layers of a model together, from small Gram matrices that are taken in the forward.

Solvers for singular values and eigenvalues take many small operations, and wait for a GPU. So a forward only multiplies
each factor by its transpose, and the solvers run once for all layers, after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.health.statistics.weights.product import Product, WeightStatistic
from headwise.health.statistics.weights.weight_reading import WeightReading


@dataclass(frozen=True, eq=False)
class Grams:
    """The Gram matrices of a product's factors in fp64: A_h A_hᵀ (H, d, d) and B_g B_gᵀ (G, d, d).

    Factors with the same Gram matrices have products with the same singular values. In fp64, the squares of weights in
    fp32 neither underflow nor overflow, and singular values are accurate to 1e-8 of the largest.

    Attributes:
        own, shared: the matrices of its two factors.
        pairs, normed, common: as of `Product`.
    """

    own: Tensor
    shared: Tensor
    pairs: Tensor | None
    normed: bool
    common: bool

    def key(self) -> tuple[object, ...]:
        """Return what products must have in common to be read together."""
        pairs = None if self.pairs is None else tuple(self.pairs.flatten().tolist())
        sizes = (self.own.shape[-1], len(self.own) // len(self.shared))
        return (self.own.device, *sizes, pairs, self.normed, self.common)

    def size(self) -> int:
        """Return the bytes that the matrices take."""
        return self.own.nbytes + self.shared.nbytes


def grams_of(reading: WeightReading) -> dict[str, Grams]:
    """Return the Gram matrices of a reading's products, by "qk" and "vo", in three operations for equal shapes."""
    factors = [x for product in reading.products.values() for x in (product.own, product.shared)]
    with torch.no_grad(), torch.autocast(factors[0].device.type if factors else "cpu", enabled=False):
        if len({x.shape[1:] for x in factors}) == 1:
            grams = list(_gram(torch.cat(factors)).split([len(x) for x in factors]))
        else:
            grams = [_gram(x) for x in factors]
    return {
        kind: Grams(grams[2 * at], grams[2 * at + 1], product.pairs, product.normed, product.common)
        for at, (kind, product) in enumerate(reading.products.items())
    }


def _gram(x: Tensor) -> Tensor:
    x = x.double()
    return x @ x.mT


def read_together(
    sites: Mapping[int, dict[str, Grams]], names: Sequence[str], statistics: Mapping[str, type[WeightStatistic]]
) -> tuple[dict[int, dict[str, Tensor]], dict[int, Tensor]]:
    """Return the figures `names` of each site, such as "stable_rank_qk", and whether all its weights are finite (0-d),
    in few solver calls. `sites` holds the Gram matrices of each site by "qk" and "vo"."""
    figures: dict[int, dict[str, Tensor]] = {site: {} for site in sites}
    parts: dict[int, list[Tensor]] = {}
    groups: dict[tuple[object, ...], list[tuple[int, str, Grams]]] = {}
    for site, by_kind in sites.items():
        for kind, grams in by_kind.items():
            groups.setdefault(grams.key(), []).append((site, kind, grams))
    with torch.no_grad():
        for members in groups.values():
            product, finite = _joined([grams for _, _, grams in members])
            for (site, _, _), known in zip(members, finite, strict=True):
                parts.setdefault(site, []).append(known)
            for name, values in _figures(product, members, names, statistics).items():
                for (site, kind, _), part in zip(members, values, strict=True):
                    if f"{name}_{kind}" in names:
                        figures[site][f"{name}_{kind}"] = part
        order = {name: at for at, name in enumerate(names)}
        ordered = {
            site: dict(sorted(found.items(), key=lambda item: order[item[0]])) for site, found in figures.items()
        }
        return ordered, {site: torch.stack(known).all() for site, known in parts.items()}


def _joined(grams: Sequence[Grams]) -> tuple[Product, Tensor]:
    """Return one product of the heads of all, with square factors, and which of them are finite, (len(grams),)."""
    own, shared = torch.cat([one.own for one in grams]), torch.cat([one.shared for one in grams])
    matrices = torch.cat([own, shared])
    finite = matrices.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], matrices, 0.0))
    roots = vectors * values.clamp_min(0).sqrt()[:, None]
    first = grams[0]
    # Of both kinds: what depends on the kind is in the other fields.
    product = Product("qk", roots[: len(own)], roots[len(own) :], first.pairs, first.normed, first.common)
    each = [finite[: len(own)].split([len(one.own) for one in grams])]
    each.append(finite[len(own) :].split([len(one.shared) for one in grams]))
    return product, torch.stack([torch.cat(known).all() for known in zip(*each, strict=True)])


def _figures(
    product: Product,
    members: Sequence[tuple[int, str, Grams]],
    names: Sequence[str],
    statistics: Mapping[str, type[WeightStatistic]],
) -> dict[str, tuple[Tensor, ...]]:
    """Return each asked figure, split into those of the members."""
    kinds = {kind for _, kind, _ in members}
    found = {}
    for name, statistic in statistics.items():
        asked = any(f"{name}_{kind}" in names for kind in kinds)
        if asked and statistic().applies(product) is None:
            values = statistic().of(product)
            per_head = len(values) == product.heads
            sizes = [len(grams.own if per_head else grams.shared) for _, _, grams in members]
            found[name] = values.split(sizes)
    return found
