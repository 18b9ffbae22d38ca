"""The weight products of two pretrained models and of their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise.health.auditing.weights import Compared
    from headwise.health.statistics.weights.product import Product

MODELS = ("stories260K", "all-MiniLM-L6-v2")


def load(model: str, data: Path | None, say: Callable[[str], None]) -> list[Product]:
    """Return the products of every attention layer of a model."""
    import torch

    from headwise.attend import hosts
    from headwise.health.statistics.weights.product import Product
    from headwise.health.statistics.weights.weight_reading import weight_reading
    from headwise_papers.data import stories260k
    from headwise_papers.tasks.pretrained import load_encoder

    if model == MODELS[0]:
        stories260k.prepare(data, say)
        layers = stories260k.read(data)
        pairs = torch.arange(layers[0].q.shape[1]).view(-1, 2)
        return [one for a in layers for one in (Product("qk", a.q, a.k, pairs), Product("vo", a.o, a.v))]
    encoder, products = load_encoder(""), []
    for one in hosts.find(encoder):
        one.site.model = encoder
        products += list(weight_reading(one.site).products.values())
    return products


def drawn(product: Product, seed: int, at: int) -> Product:
    """Return random normal weights of a product's shapes."""
    import torch

    generator = torch.Generator().manual_seed(1000 * seed + at)
    own, shared = (torch.randn(part.shape, generator=generator) for part in (product.own, product.shared))
    return replace(product, own=own, shared=shared)


def rotated(product: Product, seed: int, at: int) -> Product:
    """Return the same weights with the rows of the shared factor rotated at random.

    This keeps all norms and spectra of the factors.
    """
    import torch

    generator = torch.Generator().manual_seed(1000 * seed + at)
    turn = torch.linalg.qr(torch.randn(product.groups, product.size, product.size, generator=generator))[0]
    return replace(product, shared=turn @ product.shared)


def compare(products: list[Product]) -> dict[tuple[str, str], Compared]:
    """Return, by product and second norm, the comparisons of norms of rows and of Frobenius with nuclear norms."""
    from headwise.health.auditing.weights import balances_of, compared

    records = {
        f"{at}|{group}|{product.kind}": one
        for at, product in enumerate(products)
        for group, one in enumerate(balances_of(product))
    }
    return {(one["product"], one["second"]): one for one in compared(records)}
