"""Windows that a module declares: by the names it uses and the sizes it keeps."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from headwise.core.site import Site
from headwise.hosts.layers.code import uses
from headwise.hosts.layers.declared import shifts_windows
from headwise.hosts.sdpa.shape import SAMPLE_MAJOR

# Attention inside of windows that the module itself, or the block around it, cuts.
CLASSES = re.compile(
    r"window|partition|locallygrouped|maskunit|localattention|neighborhood|blockattention", re.IGNORECASE
)
CUTS = r"window_partition|grid_partition|window_unpartition|window_reverse|blockify"
SIZES = ("window_size", "partition_size", "win_size", "ws", "window")


def declared(model: nn.Module, site: Site) -> None:
    """Note on the site whether its module, or the block around it, declares to attend in windows, and whether it
    pools."""
    block = model.get_submodule(site.name.rpartition(".")[0]) if "." in site.name else None
    around = [site.module, *([block] if block is not None and block is not model else [])]
    site.windowed = any(_cuts(module) for module in around)
    site.shifted = site.windowed and shifts_windows(around)
    site.pooled = not site.is_cross and pools(site.module)
    # The layouts of timm are sample-major; a test holds each of them to it. Others are seen on an example.
    if site.windowed and type(site.module).__module__.startswith("timm."):
        site.row_order = SAMPLE_MAJOR


def pools(module: nn.Module) -> bool:
    """Return whether a module declares to pool its queries or keys, as PVT, Twins and Hiera do."""
    ratios = [getattr(module, name, 1) for name in ("sr_ratio", "q_stride", "kv_stride", "reduction_ratio")]
    reducer = getattr(module, "sr", None)
    kept = reducer is None or isinstance(reducer, nn.Identity) or not isinstance(reducer, nn.Module)
    return not kept or any(_positive(ratio) and ratio not in (1, (1, 1)) for ratio in ratios)


def _cuts(module: nn.Module) -> bool:
    if getattr(module, "use_mask_unit_attn", True) is False:
        return False
    sizes = [getattr(module, name) for name in SIZES if hasattr(module, name)]
    if sizes and not any(_positive(size) for size in sizes):
        return False
    named = CLASSES.search(type(module).__name__) is not None
    return named or uses(module, CUTS) or (bool(sizes) and _blocks_of_tokens(module))


def _blocks_of_tokens(module: nn.Module) -> bool:
    # A size of windows alone tells nothing: BEiT keeps the size of the whole grid under that name.
    return "TinyVit" in type(module).__name__


def _positive(size: Any) -> bool:
    values = size if isinstance(size, tuple | list) else [size]
    return all(isinstance(value, int) and value > 0 for value in values) and bool(values)
