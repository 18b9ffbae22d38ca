"""Weight records: the figures of every head of a checkpoint, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise import hosts
from headwise.auditing.balances import balances_of
from headwise.auditing.checkpoint import Checkpoint, weights_in_place
from headwise.auditing.records import BalanceRecord, Layer, WeightRecord
from headwise.core.site import Site
from headwise.projections import ProjectionError, whole
from headwise.statistics.weights import WEIGHT_STATISTICS, WeightReading, read_weights, weight_reading, weight_reasons
from headwise.statistics.weights.weight_statistic import unbalanced

# Widths up to which one thread is faster.
SMALL = 2048
# Layers whose reasons are listed where none can be read.
SHOWN = 3
PRODUCTS = {"qk": "W_KᵀW_Q", "vo": "W_OW_V"}


@dataclass
class Read:
    """Everything read of a checkpoint: records, spectra per (site, head, product), balances per (site, group, product),
    and what is to be said beside them.

    `not_finite` names weights with NaN or infinity, `unused` those of attention layers that the files hold and the
    model has not.
    """

    records: list[WeightRecord] = field(default_factory=list)
    spectra: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    balances: dict[tuple[str, int, str], BalanceRecord] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def read_checkpoint(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> Read:
    """Read the weights of every attention layer; at most one layer's are in memory at a time.

    Args:
        checkpoint: the opened checkpoint.
        progress: called with (layers done, layers).

    Raises:
        ValueError: if the model has no attention layer that can be read.
    """
    found = hosts.find(checkpoint.model)
    if not found:
        raise ValueError(
            f"{checkpoint.name}: {type(checkpoint.model).__name__} has no attention layer that headwise can see"
        )
    read = Read(unused=_of_attention(checkpoint.unused, [one.site.name for one in found]))
    with threads(1) as most:
        for index, one in enumerate(found):
            one.site.model = checkpoint.model
            _read_site(read, checkpoint, one.site, most)
            if progress is not None:
                progress(index + 1, len(found))
    # Of a training that diverged everywhere no figure is left: that is what there is to say of it.
    if not read.records and not read.not_finite:
        reasons = [layer["missing"].get("qk", "") for layer in read.layers]
        more = f"\nand {len(reasons) - SHOWN} more layers" if len(reasons) > SHOWN else ""
        raise ValueError(
            f"{checkpoint.name}: the weights of none of its attention layers can be told apart:\n"
            + "\n".join(reasons[:SHOWN])
            + more
        )
    return read


def _of_attention(names: list[str], sites: list[str]) -> list[str]:
    """Choose the names of attention layers: those that differ from a site of the model in the numbers alone."""
    known = {re.sub(r"\d+", "#", site) for site in sites}
    return [name for name in names if any(re.sub(r"\d+", "#", name).startswith(f"{site}.") for site in known)]


def _read_site(read: Read, checkpoint: Checkpoint, site: Site, most: int) -> None:
    try:
        found = checkpoint.projections(site)
    except ProjectionError as error:
        read.layers.append(_layer(site, None, dict.fromkeys(PRODUCTS, str(error)), [], {}))
        return
    with weights_in_place(checkpoint, found):
        reading = weight_reading(site, found)
        broken = [b.where for b in found.blocks if not bool(torch.isfinite(whole(getattr(b.module, b.name))).all())]
        layer = _layer(site, found.layout, reading.missing, list(reading.notes), weight_reasons(reading))
        layer["heads"], layer["kv_heads"] = found.heads, found.kv_heads
        read.layers.append(layer)
        if broken:
            read.not_finite += list(dict.fromkeys(broken))
            layer["reasons"] = {"all": f"{broken[0]} holds NaN or infinity"}
            return
        with threads(threads_for(reading, most)):
            for name, values in read_weights(reading).items():
                read.records += _records(site, name, values, found.heads)
            for kind, product in reading.products.items():
                for head, values in enumerate(product.spectrum.tolist()):
                    read.spectra[site.name, head, kind] = values
                if unbalanced(product) is None:
                    read.balances |= {(site.name, at, kind): one for at, one in enumerate(balances_of(product))}


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
    """Set the number of threads, give what it was, and put it back."""
    known = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield known
    finally:
        torch.set_num_threads(known)


def threads_for(reading: WeightReading, most: int) -> int:
    """Return 1 where matrices are small: there several threads spend their time waiting for each other."""
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
