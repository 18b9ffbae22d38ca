"""Describe a transformers attention module before any call."""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.core.site import Site
from headwise.hosts.layers.code import names_used
from headwise.hosts.layers.declared import is_cross, other_positions, shifts_windows
from headwise.projections.leaves import Leaf, leaves
from headwise.projections.names import (
    COMPARED_DIM,
    HALVES_HEADS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    PROJECTIONS,
    QK_NORMS,
    first_number,
)

CAUSAL_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
WINDOWS = ("window_size", "num_windows")


def describe(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Site:
    """Return the site of an attention module; `modules` are all modules of the model by qualified name."""
    config = getattr(module, "config", None)
    site = Site(name, module, host="transformers", is_cross=is_cross(name, module))
    around = ancestors(name, modules)
    q, k, into = _leaves(module)
    site.heads = first_number(module, HEADS) or first_number(config, (*HEADS, *HALVES_HEADS))
    site.head_dim = first_number(module, COMPARED_DIM)
    if site.heads is None and q is not None and site.head_dim is not None:
        site.heads = q.rows // site.head_dim
    if site.head_dim is None and q is not None and site.heads is not None:
        site.head_dim = q.rows // site.heads
    site.hidden = into.columns if into is not None else first_number(config, HIDDEN)
    if site.head_dim is None and site.heads is not None and site.hidden is not None:
        site.head_dim = site.hidden // site.heads
    site.kv_heads = _kv_heads(module, site, k)
    site.qk_norm = any(_is_norm(getattr(module, n, None)) for n in QK_NORMS)
    site.rope = _rope(module)
    site.causal = False if site.is_cross else _causal(module, around)
    site.windowed = any(_cuts_windows(parent) for parent in (module, *around[:2]))
    site.shifted = site.windowed and shifts_windows((module, *around[:2]))
    return site


def ancestors(name: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the parents of a module, the nearest first, without containers."""
    parents = []
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(modules[name], nn.ModuleList | nn.ModuleDict | nn.Sequential):
            parents.append(modules[name])
    return parents


def _leaves(module: nn.Module) -> tuple[Leaf | None, Leaf | None, Leaf | None]:
    """Return the leaf of the queries, that of the keys, and one that takes the layer's input."""
    direct = {leaf.name: leaf for leaf in leaves(module, "") if leaf.weight.dim() == 2}
    q = next((leaf for name, leaf in direct.items() if name.lower() in PROJECTIONS["q"]), None)
    k = next((leaf for name, leaf in direct.items() if name.lower() in PROJECTIONS["k"]), None)
    into = q or next((leaf for name, leaf in direct.items() if name.lower() not in PROJECTIONS["o"]), None)
    return q, k, into


def _kv_heads(module: nn.Module, site: Site, k: Leaf | None) -> int | None:
    declared = first_number(module, KV_HEADS)
    if declared is not None or site.heads is None:
        return declared
    if k is not None and site.head_dim is not None and k.rows % site.head_dim == 0:
        return k.rows // site.head_dim
    return site.heads // (first_number(module, ("num_key_value_groups",)) or 1)


def _is_norm(norm: Any) -> bool:
    return isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity)


def _rope(module: nn.Module) -> bool:
    # SmolLM3 and Llama 4 copy use_rope from a list of 0 and 1 in the config.
    if getattr(module, "use_rope", True) in (False, 0) or other_positions(module):
        return False
    names = [n for n in names_used(type(module).forward) if "rotary" in n or "rope" in n.lower()]
    # An attribute of the module with such a name counts only if it is set.
    return any(getattr(module, n, True) not in (None, False) for n in names if n != "use_rope")


def _causal(module: nn.Module, around: list[nn.Module]) -> bool | None:
    declared = getattr(module, "is_causal", None)
    if declared is True:
        return True
    for parent in around:
        masks = {n for n in names_used(type(parent).forward) if n.startswith("create_") and n.endswith("_mask")}
        if masks:
            # Some, such as CLIP's text model, pass causality with each call and declare none.
            causal = masks <= CAUSAL_MASKS or (
                getattr(module, "is_decoder", False) is True and bool(masks & CAUSAL_MASKS)
            )
            return True if causal else declared
        if hasattr(parent, "get_input_embeddings"):
            break
    return declared if isinstance(declared, bool) else None


def _cuts_windows(module: nn.Module) -> bool:
    """Return whether a module cuts its input into windows: it has a window size and calls a partition function."""
    size = next((x for x in (getattr(module, n, None) for n in WINDOWS) if x is not None), 0)
    if not (any(size) if isinstance(size, tuple | list) else isinstance(size, int) and size > 0):
        return False
    return any("window" in n and ("partition" in n or "unpartition" in n) for n in names_used(type(module).forward))
