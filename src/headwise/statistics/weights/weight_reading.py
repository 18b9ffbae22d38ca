"""Weight reading: the products of one site, what their figures are, and what to know of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from headwise import projections
from headwise.core.site import Site
from headwise.projections import ProjectionError, Projections
from headwise.projections.latent import MAKES
from headwise.projections.products import product_of
from headwise.statistics.weights.product import Product
from headwise.statistics.weights.rotary import rotary_pairs

ROTARY = (
    "rotary positions stand between queries and keys: W_KᵀW_Q is the product for tokens at the same position, at a "
    "distance each "
    "rotary pair is turned; only the traces of rotary pairs balance"
)
NORMED = (
    "queries and keys are normalised: the size of W_KᵀW_Q has no meaning for the logits, and the law of weight decay "
    "does not apply"
)
BIASED = "{} have biases, which the products leave out"
LATENT = (
    "latent attention: the products are those of the normalised latents that enter the up projections, and of the "
    "layer's input for "
    "the rotary key, which all heads share"
)
JOINT = (
    "joint attention: the products are those of pairs of image and text tokens, whose weights stand beside each other"
)
GROUPED = "{} query heads share {} key/value heads: balance and gap are those of groups, summed over their heads"


@dataclass(frozen=True, eq=False)
class WeightReading:
    """Holds the products "qk" and "vo" of a site (those that could be found), reasons for what is missing, and
    notes."""

    products: dict[str, Product]
    missing: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def weight_reading(site: Site, found: Projections | None = None, dtype: torch.dtype = torch.float32) -> WeightReading:
    """Read the weights of a site, without gradient.

    Args:
        site: the attention layer.
        found: its projections, where they are at hand.
        dtype: in which the products are computed; fp32 gives singular values to 1e-6 of the largest.
    """
    try:
        found = found or projections.of(site)
    except ProjectionError as error:
        return WeightReading({}, {"qk": str(error), "vo": str(error)})
    products: dict[str, Product] = {}
    missing: dict[str, str] = {}
    kinds: tuple[Literal["qk"], Literal["vo"]] = ("qk", "vo")
    with torch.no_grad():
        for kind in kinds:
            try:
                own, shared = (x.detach().to(dtype) for x in product_of(found, kind, "it"))
                products[kind] = _product(site, kind, own, shared, bool(found.latent))
            except ProjectionError as error:
                missing[kind] = str(error)
    return WeightReading(products, missing, tuple(_notes(site, found)))


def _product(site: Site, kind: str, own: Tensor, shared: Tensor, latent: bool) -> Product:
    rotary = kind == "qk" and site.rope and not latent
    pairs = rotary_pairs(site, own.shape[1]).to(own.device, non_blocking=True) if rotary else None
    return Product(kind, own, shared, pairs, normed=kind == "qk" and site.qk_norm, common=kind == "qk" and latent)


def _notes(site: Site, found: Projections) -> list[str]:
    notes = []
    if site.rope:
        notes.append(ROTARY)
    if site.qk_norm:
        notes.append(NORMED)
    if found.latent:
        notes.append(LATENT)
    if found.context is not None:
        notes.append(JOINT)
    words = {"q": "queries", "k": "keys", "v": "values", "o": "the output"}
    made = [MAKES.get(block.kind, block.kind) for block in found.blocks if block.bias_module is not None]
    biased = [word for kind, word in words.items() if any(kind in one for one in made)]
    if biased:
        notes.append(
            BIASED.format(" and ".join([", ".join(biased[:-1]), biased[-1]]) if len(biased) > 1 else biased[0])
        )
    if found.q is not None and found.k is not None and found.q.heads != found.k.heads:
        notes.append(GROUPED.format(found.q.heads, found.k.heads))
    return notes
