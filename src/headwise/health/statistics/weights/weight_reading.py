"""Weight reading: the products of one site, and notes on the meaning of their figures."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.attend import Site, projections
from headwise.attend.hosts import forward_of, names_used, reached
from headwise.attend.projections import MAKES, ProjectionError, Projections, product_of
from headwise.health.statistics.weights.product import Product


def rotary_pairs(site: Site, size: int) -> Tensor:
    """Return the pairs (pairs, 2) of a head's rows that are rotated into each other; other rows are (row, row).

    The pairing is read from the layer's own rotation function. Without one, the halves are paired, as in most hosts.
    """
    rotated = _rotated_rows(site, size)
    half = rotated // 2
    first = torch.arange(0, rotated, 2) if _pairs_neighbours(site) else torch.arange(half)
    second = first + 1 if _pairs_neighbours(site) else first + half
    rest = torch.arange(rotated, size)
    return torch.stack([torch.cat([first, rest]), torch.cat([second, rest])], dim=1)


def _pairs_neighbours(site: Site) -> bool:
    module = site.module
    # timm's layers have an attribute for it; timm's function, and copies of it, have the default of `half`.
    declared = getattr(module, "rotate_half", None)
    if isinstance(declared, bool):
        return not declared
    for function in reached(forward_of(module), type(module), 3):
        half = inspect.signature(function).parameters.get("half")
        if half is not None and isinstance(half.default, bool):
            return not half.default
        if "view_as_complex" in names_used(function):
            # A complex number consists of two neighbouring numbers.
            return True
        if "rot" in function.__name__ and (first := _first_rotated(function)) is not None:
            return first == -2.0
    return False


def _first_rotated(function: Any) -> float | None:
    """Return the first number of a function's result for (1, 2, 3, 4) if it rotates halves or neighbours, else None.

    The result is (-3, -4, 1, 2) for halves and (-2, 1, -4, 3) for neighbours.
    """
    try:
        rotated = function(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    except Exception:
        return None
    known = ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0])
    return rotated.tolist()[0] if isinstance(rotated, Tensor) and rotated.tolist() in known else None


def _rotated_rows(site: Site, size: int) -> int:
    config = getattr(site.module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    shares = (
        getattr(site.module, "partial_rotary_factor", None),
        parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None,
        getattr(config, "partial_rotary_factor", None),
        getattr(config, "rotary_pct", None),
    )
    share = next((float(share) for share in shares if isinstance(share, int | float)), None)
    return size if share is None else int(size * share) // 2 * 2


ROTARY = (
    "rotary positions: W_KᵀW_Q is the product for tokens at the same position, and each rotary pair is rotated for "
    "tokens at a distance; only the traces of rotary pairs balance"
)
NORMED = (
    "queries and keys are normalised: the size of W_KᵀW_Q has no meaning for the logits, and the law of weight decay "
    "does not apply"
)
BIASED = "W_KᵀW_Q and W_OW_V leave out the biases of {}"
LATENT = (
    "latent attention: the products use the normalised latents that enter the up projections, and the "
    "layer's input for the rotary key, which all heads share"
)
JOINT = "joint attention: the products use pairs of image and text tokens, whose weights are concatenated"
GROUPED = "{} query heads share {} key/value heads: balance and gap are of groups, summed over their heads"


@dataclass(frozen=True, eq=False)
class WeightReading:
    """The available products "qk" and "vo" of a site, the reasons for missing ones, and notes."""

    products: dict[str, Product]
    missing: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def weight_reading(site: Site, found: Projections | None = None, dtype: torch.dtype = torch.float32) -> WeightReading:
    """Return the products of a site's weights, without gradient.

    Args:
        dtype: dtype of the computation; with fp32, singular values are accurate to 1e-6 of the largest.
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
    pairs = rotary_pairs(site, own.shape[1]) if rotary else None
    return Product(kind, own, shared, pairs, normed=kind == "qk" and site.qk_norm, common=kind == "qk" and latent)


def _notes(site: Site, layer: Projections) -> list[str]:
    notes = []
    if site.rope:
        notes.append(ROTARY)
    if site.qk_norm:
        notes.append(NORMED)
    if layer.latent:
        notes.append(LATENT)
    if layer.context is not None:
        notes.append(JOINT)
    words = {"q": "queries", "k": "keys", "v": "values", "o": "the output"}
    kinds = "".join(MAKES.get(block.kind, block.kind) for block in layer.blocks if block.bias_module is not None)
    biased = [word for kind, word in words.items() if kind in kinds]
    if biased:
        notes.append(
            BIASED.format(" and ".join([", ".join(biased[:-1]), biased[-1]]) if len(biased) > 1 else biased[0])
        )
    if layer.q is not None and layer.k is not None and layer.q.heads != layer.k.heads:
        notes.append(GROUPED.format(layer.q.heads, layer.k.heads))
    return notes
