"""Layers that mix tokens without a softmax over keys, and routers of experts, with what a watch can read of them.

No statistic of heads is defined for them. What remains are figures of their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from headwise.attend import Site
from headwise.health.watching.updates import GRADIENT_NORM, REST, UPDATE_RATIO, groups
from headwise.health.watching.weights import Matrices

# By the names of classes in transformers, flash-linear-attention and the authors' code.
LINEAR = re.compile(
    r"DeltaNet|Delta(Rule)?Attention|LinearAttention|LightningAttention|Retention|RetNet|Mamba\w*Mixer|Mamba2?$|SSM"
    r"|Rwkv\w*Attention|RWKV\w*(TimeMix|Attention)|GatedLinear|HGRN|ShortConv|RecurrentBlock|RgLru"
)
ROUTER = re.compile(r"Router$|(MoE|MoeTop\w|TopK|Switch|Noisy)Gate$", re.IGNORECASE)
# The name of the reason, which is that of every statistic of heads.
EVERY = "statistics of heads"


def beside(model: nn.Module, sites: Sequence[Site]) -> dict[str, str]:
    """Return why these layers have no statistic of heads and what can be read of them, by qualified name."""
    found = dict(_found(model, {site.module for site in sites}))
    if not found:
        return {}
    owners = {id(p): group.name for group in groups(model, list(sites)) for p in group.parameters}
    matrices = [matrix.name for matrix in Matrices(model, list(sites)).found]
    return {name: f"{what}; {_readable(name, model, owners, matrices)}" for name, what in found.items()}


def _found(model: nn.Module, attention: set[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the name of each outermost such layer, and what it is."""
    outer: list[str] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not name or any(name.startswith(f"{one}.") for one in outer) or next(module.parameters(), None) is None:
            continue
        if not attention.isdisjoint(module.modules()):
            continue
        if LINEAR.search(kind):
            what = f"{kind} mixes tokens without a softmax over keys"
        elif ROUTER.search(kind) or _gate_of_experts(name, model):
            what = f"{kind} sends tokens to experts, and has no heads"
        else:
            continue
        outer.append(name)
        yield name, what


def _gate_of_experts(name: str, model: nn.Module) -> bool:
    """Return whether a module is the linear layer that chooses among the experts next to it."""
    above, _, own = name.rpartition(".")
    parent = model.get_submodule(above)
    return own in ("gate", "router", "wg") and isinstance(getattr(parent, "experts", None), nn.Module)


def _readable(name: str, model: nn.Module, owners: dict[int, str], matrices: list[str]) -> str:
    """Return which statistics of the whole model cover the parameters of a layer."""
    held = {owners.get(id(p)) for p in model.get_submodule(name).parameters()} - {None}
    places = ", ".join(
        "the parameters outside all blocks" if one == REST else str(one) for one in sorted(map(str, held))
    )
    own = [one for one in matrices if one == name or one.startswith(f"{name}.")]
    read = [f"{GRADIENT_NORM} and {UPDATE_RATIO} read it with {places}"] if held else []
    read += [f"matrix_norm reads {', '.join(one.removeprefix(f'{name}.') for one in own)}"] if own else []
    return " and ".join(read) or "nothing of it is read: its parameters are not trained"
