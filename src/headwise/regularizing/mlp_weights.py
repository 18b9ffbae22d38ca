"""Which matrices of a model are its blocks' MLPs: found by where they stand, not by names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from headwise.core.site import Site
from headwise.hosts.layers.declared import LIKE

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def mlp_weights(model: nn.Module, sites: list[Site], attention: set[int]) -> list[nn.Parameter]:
    """Return the matrices that share a block with an attention layer and are not its own: experts and their router too.

    The block of a layer is the smallest module around it that holds further matrices; it ends below a stack of alike
    layers and below the model itself, where embeddings and heads stand. `attention` holds the ids of attention's
    weights.
    """
    found: dict[int, nn.Parameter] = {}
    for site in sites:
        own = _inside(site)
        for block in _ancestors(model, site):
            if _is_stack(block, sites):
                break
            matrices = [p for p in _matrices(block, own) if id(p) not in attention]
            if matrices:
                found |= {id(p): p for p in matrices}
                break
    return list(found.values())


def _inside(site: Site) -> set[int]:
    """Return the ids of what belongs to the attention layer itself; of a whole block that attends, only what methods
    added."""
    module = site.module
    if not LIKE.search(type(module).__name__):
        added = module._modules.get("headwise")
        return {id(p) for p in added.parameters()} if added is not None else set()
    return {id(p) for p in module.parameters()}


def _ancestors(model: nn.Module, site: Site) -> Iterator[nn.Module]:
    """Return the layer itself, then what stands around it, without the model."""
    # A site is named in the model that was regularized, which adapters or DDP may stand around since.
    around, parts = site.model or model, site.name.split(".")
    for end in range(len(parts), 0, -1):
        yield around.get_submodule(".".join(parts[:end]))


def _is_stack(module: nn.Module, sites: list[Site]) -> bool:
    """Tell a list of alike layers: two children of one type that both hold attention."""
    if not isinstance(module, CONTAINERS):
        return False
    attending = {id(site.module) for site in sites}
    kinds = [type(child) for child in module.children() if any(id(part) in attending for part in child.modules())]
    return len(kinds) > len(set(kinds))


def _matrices(block: nn.Module, own: set[int]) -> Iterator[nn.Parameter]:
    for place, module in block.named_modules():
        norm = type(module).__name__.lower().endswith("norm")
        if isinstance(module, nn.Embedding) or norm or ".headwise" in f".{place}":
            continue
        for name, parameter in module.named_parameters(recurse=False):
            matrix = parameter.ndim > 1 and parameter.numel() > max(parameter.shape)
            if matrix and "bias" not in name and id(parameter) not in own:
                yield parameter
