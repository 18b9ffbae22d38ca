"""Where the branches of a block end: the modules after which attention and the MLP are added to the residual stream."""

from __future__ import annotations

import re

from torch import nn

from headwise.attend import projections
from headwise.attend.core import Site
from headwise.attend.hosts.layers.branch_walk import drops, last_after, norms
from headwise.attend.projections import ProjectionError
from headwise.attend.projections.leaves import Leaf

# The names of a block's other branch, and of its classes, in transformers, timm, diffusers and own models.
NAMES = re.compile(r"(^|_)(mlp|ffn?|feed_?forward|moe|densereludense)(_|$)", re.IGNORECASE)
CLASSES = re.compile(r"mlp|ffn|feedforward|moe|dense(relu|gated)?act", re.IGNORECASE)


def attention(site: Site) -> tuple[nn.Module, nn.Module | None]:
    """Return the module whose result is that of attention, and the last dropout or norm after it, or None.

    Raises:
        ProjectionError: if it cannot be determined.
    """
    start = site.module if site.host == "torch" else projections.output(site, "attention_write").module
    return start, None if site.model is None else last_after(site.model, start)


def mlp(site: Site, block: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Return the same for the other branch of the block around a site.

    Raises:
        ProjectionError: if it cannot be determined.
    """
    start = mlp_of(block, site)
    return start, None if site.model is None else last_after(site.model, start)


def mlp_of(block: nn.Module, site: Site) -> nn.Module:
    """Return the module of a block whose result is that of its MLP, before any dropout or norm of the branch.

    It is the outermost module beside attention that is named as one, or has such a class; without one, the last linear
    layer beside attention that leads from another width to that of the stream.

    Raises:
        ProjectionError: if there is none, or if there are several.
    """
    beside = {n: m for n, m in block.named_modules() if n and site.module not in set(m.modules())}
    within = {m for n, m in site.module.named_modules()}
    found = [n for n, m in beside.items() if m not in within and _is_mlp(n.rpartition(".")[2], m)]
    found = [n for n in found if not any(n.startswith(f"{outer}.") for outer in found)]
    if len(found) > 1:
        raise ProjectionError(f"its block has several MLPs: {', '.join(found)}")
    if found:
        return beside[found[0]]
    width = site.hidden
    linear = [
        leaf.module
        for leaf in Leaf.below(block, "")
        if leaf.module in beside.values() and leaf.module not in within
        and leaf.weight.dim() == 2 and leaf.weight.shape[0] == width != leaf.weight.shape[1]
    ]  # fmt: skip
    if not linear:
        raise ProjectionError("its block has no MLP beside attention that is named as one")
    return linear[-1]


def _is_mlp(name: str, module: nn.Module) -> bool:
    named = NAMES.search(name) or CLASSES.search(type(module).__name__)
    several = sum(p.dim() >= 2 for p in module.parameters()) > 1
    return bool(named) and several and not norms(module) and not drops(module)
