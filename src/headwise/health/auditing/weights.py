"""The figures of the weights of every head of a checkpoint, read layer by layer, and the norms that decay equals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import TypedDict

from headwise.attend import Site, hosts
from headwise.attend.projections import Block, ProjectionError, whole
from headwise.files.errors import CheckpointError
from headwise.health.auditing.checkpoint import Checkpoint, weights_in_place
from headwise.health.auditing.records import BalanceRecord, Layer, WeightRecord
from headwise.health.statistics.weights import (
    WEIGHT_STATISTICS,
    WeightReading,
    read_weights,
    weight_reading,
    weight_reasons,
)
from headwise.health.statistics.weights.balance import balance
from headwise.health.statistics.weights.product import Product, unbalanced

# Up to this width of the matrices one thread is faster.
SMALL = 2048
# The number of layers whose reasons are listed if none can be read.
SHOWN = 3
PRODUCTS = {"qk": "W_KᵀW_Q", "vo": "W_OW_V"}


@dataclass
class Read:
    """The readings of a checkpoint: records, spectra by (site, head, product), balances by (site, group, product).

    `not_finite` names weights with NaN or infinity, and `unused` weights of attention layers in the files that the
    model does not use.
    """

    records: list[WeightRecord] = field(default_factory=list)
    spectra: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    balances: dict[tuple[str, int, str], BalanceRecord] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def read_checkpoint(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> Read:
    """Return the readings of every attention layer; at most one layer's weights are in memory at a time.

    Raises:
        ValueError: if the model has no attention layer that can be read.
    """
    candidates = hosts.find(checkpoint.model)
    if not candidates:
        raise ValueError(
            f"{checkpoint.name}: {type(checkpoint.model).__name__} has no attention layer that headwise can see"
        )
    read = Read(unused=_of_attention(checkpoint.unused, [candidate.site.name for candidate in candidates]))
    with threads(1) as most:
        for index, candidate in enumerate(candidates):
            candidate.site.model = checkpoint.model
            _read_site(read, checkpoint, candidate.site, most)
            if progress is not None:
                progress(index + 1, len(candidates))
    # A checkpoint whose weights are all not finite has no records, and that is its result, not an error.
    if not read.records and not read.not_finite:
        reasons = [layer["missing"].get("qk", "") for layer in read.layers]
        more = f"\nand {len(reasons) - SHOWN} more layers" if len(reasons) > SHOWN else ""
        raise ValueError(
            f"{checkpoint.name}: queries, keys, values and outputs can be separated in none of its attention layers:\n"
            + "\n".join(reasons[:SHOWN])
            + more
        )
    return read


def _of_attention(names: list[str], sites: list[str]) -> list[str]:
    """Return the names that belong to attention layers, by the names of the sites with all numbers replaced."""
    patterns = {re.sub(r"\d+", "#", site) for site in sites}
    return [name for name in names if any(re.sub(r"\d+", "#", name).startswith(f"{site}.") for site in patterns)]


def _read_site(read: Read, checkpoint: Checkpoint, site: Site, most: int) -> None:
    try:
        layout = checkpoint.projections(site)
    except ProjectionError as error:
        layer = _layer(site, None, dict.fromkeys(PRODUCTS, str(error)), [], {})
        if site.heads:
            layer["heads"] = site.heads
        read.layers.append(layer)
        read.not_finite += _not_finite(checkpoint, site, [])
        return
    with weights_in_place(checkpoint, layout):
        reading = weight_reading(site, layout)
        broken = _not_finite(checkpoint, site, layout.blocks)
        layer = _layer(site, layout.layout, reading.missing, list(reading.notes), weight_reasons(reading))
        layer["heads"], layer["kv_heads"] = layout.heads, layout.kv_heads
        read.layers.append(layer)
        if broken:
            read.not_finite += broken
            layer["reasons"] = {"all": f"{broken[0]} holds NaN or infinity"}
            return
        with threads(threads_for(reading, most)):
            for name, values in read_weights(reading).items():
                read.records += _records(site, name, values, layout.heads)
            for kind, product in reading.products.items():
                for head, values in enumerate(product.spectrum.tolist()):
                    read.spectra[site.name, head, kind] = values
                if unbalanced(product) is None:
                    read.balances |= {
                        (site.name, group, kind): record for group, record in enumerate(balances_of(product))
                    }


def _not_finite(checkpoint: Checkpoint, site: Site, blocks: Sequence[Block]) -> list[str]:
    """Return the names of a layer's weights, biases and gains that hold NaN or infinity, each once."""
    tensors = {block.where: whole(getattr(block.module, block.name)) for block in blocks}
    for name, parameter in site.module.named_parameters(prefix=site.name):
        if name not in tensors and not parameter.is_meta:
            tensors[name] = whole(parameter)
        elif name not in tensors and parameter.dim() == 1:
            # a bias or a gain of a checkpoint; what its files lack is told where the model is loaded
            with suppress(CheckpointError):
                tensors |= checkpoint.tensors([name])
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all())
    ]


def _layer(site: Site, layout: str | None, missing: dict[str, str], notes: list[str], reasons: dict[str, str]) -> Layer:
    return {
        "site": site.name,
        "depth": site.depth,
        "stack": site.stack,
        "cross": site.is_cross,
        "layout": layout,
        "missing": missing,
        "notes": notes,
        "reasons": reasons,
    }


@contextmanager
def threads(count: int) -> Iterator[int]:
    """Set torch's number of threads inside the context; the context's value is the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def threads_for(reading: WeightReading, most: int) -> int:
    """Return the number of threads for a layer: 1 for small matrices, on which several threads are slower."""
    return 1 if all(product.width <= SMALL for product in reading.products.values()) else most


def _records(site: Site, name: str, values: Tensor, heads: int) -> Iterator[WeightRecord]:
    statistic, _, kind = name.rpartition("_")
    per_group = WEIGHT_STATISTICS[statistic].per == "group" and len(values) < heads
    for index, value in enumerate(values.double().tolist()):
        record: WeightRecord = {
            "site": site.name,
            "depth": site.depth,
            "head": None if per_group else index,
            "statistic": name,
            "product": PRODUCTS[kind],
            "value": value,
        }
        if per_group:
            record["group"] = index
        yield record


def in_words(statistic: str) -> str:
    """Return a statistic's name in words, with its product."""
    name, _, kind = statistic.rpartition("_")
    return f"{name.replace('_', ' ')} of {PRODUCTS[kind]}" if kind in PRODUCTS else statistic.replace("_", " ")


# a mean difference up to this share of the mean counts as nearly identical
NEARLY = 0.05
# the two kinds of norms that are compared, per product
ROWS = {"qk": ("row norm of W_Q", "row norm of W_K"), "vo": ("column norm of W_O", "row norm of W_V")}
NORMS = ("½(‖A‖² + ‖B‖²)", "nuclear norm of the product")


class Compared(TypedDict):
    """A comparison of two kinds of norms over all heads: the pairs, and how far they are from equal."""

    product: str
    first: str
    second: str
    pairs: list[tuple[float, float]]
    # mean difference over mean
    deviation: float
    # Pearson's; NaN if one kind does not vary
    correlation: float
    verdict: str


def balances_of(product: Product) -> list[BalanceRecord]:
    """Return the balance of a product for each group of heads."""
    norms = balance(product)
    parts = (norms.own.tolist(), norms.shared.tolist(), norms.frobenius.tolist(), norms.nuclear.tolist())
    return [
        {"own": own, "shared": shared, "frobenius": frobenius, "nuclear": nuclear}
        for own, shared, frobenius, nuclear in zip(*parts, strict=True)
    ]


def compared(balances: dict[str, BalanceRecord]) -> list[Compared]:
    """Return for both products the comparisons of row norms with row norms and of Frobenius with nuclear norms."""
    comparisons = []
    for kind, rows in ROWS.items():
        of_kind = [record for place, record in balances.items() if place.rpartition("|")[2] == kind]
        if not of_kind:
            continue
        row_norms = (pair for record in of_kind for pair in zip(record["own"], record["shared"]))
        comparisons.append(_compare(kind, rows, row_norms))
        comparisons.append(_compare(kind, NORMS, ((record["frobenius"], record["nuclear"]) for record in of_kind)))
    return comparisons


def _compare(kind: str, names: tuple[str, str], pairs: Iterable[tuple[float, float]]) -> Compared:
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    deviation = _deviation(finite)
    return {
        "product": kind,
        "first": names[0],
        "second": names[1],
        "pairs": finite,
        "deviation": deviation,
        "correlation": _correlation(finite),
        "verdict": _verdict(deviation),
    }


def _verdict(deviation: float) -> str:
    if math.isnan(deviation):
        return "cannot be determined"
    return "nearly identical" if deviation <= NEARLY else "not identical"


def _deviation(pairs: list[tuple[float, float]]) -> float:
    size = math.fsum(x + y for x, y in pairs) / 2
    return math.fsum(abs(x - y) for x, y in pairs) / size if size else math.nan


def _correlation(pairs: list[tuple[float, float]]) -> float:
    count = len(pairs)
    means = [math.fsum(pair[side] for pair in pairs) / count for side in (0, 1)] if count else []
    spreads = [math.fsum((pair[side] - means[side]) ** 2 for pair in pairs) for side in (0, 1)] if count else [0.0, 0.0]
    if not all(spreads):
        return math.nan
    covariance = math.fsum((x - means[0]) * (y - means[1]) for x, y in pairs)
    return covariance / math.sqrt(spreads[0] * spreads[1])
