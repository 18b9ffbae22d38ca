"""Adapted: the weight that a layer computes with, adapters included, where it is more than the parameter it keeps.

Adapters are those of peft: LoRA's effective weight is base + sum of scale * B A over the active adapters. What cannot
be written as one weight is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

MERGE = "merge the adapters into plain weights first (merge_and_unload())"


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer of peft that stands around a plain one."""
    # Read only where the user has imported peft: a layer of it cannot exist otherwise.
    known = sys.modules.get("peft.tuners.tuners_utils")
    return known is not None and isinstance(module, known.BaseTunerLayer) and "base_layer" in module._modules


def base_of(module: nn.Module) -> nn.Module:
    """Return the plain layer inside of adapters, or the module itself."""
    while is_adapted(module):
        module = module.get_submodule("base_layer")
    return module


def obstacle(module: nn.Module) -> str:
    """Say why the effective weight of a module cannot be told: the end of a sentence about its weight; else empty."""
    if not is_adapted(module):
        return ""
    layer: Any = module
    if layer.merged or layer.disable_adapters:
        return obstacle(layer.base_layer)
    kind = type(module)
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or not isinstance(module, lora.Linear | lora._ConvNd):
        return (
            f"is adapted by peft's {kind.__module__.split('.')[-2]} {kind.__name__}, whose effect is no single "
            f"weight: {MERGE}"
        )
    variants = [type(layer.lora_variant[name]).__name__ for name in _active(layer) if name in layer.lora_variant]
    if variants:
        return f"is adapted by LoRA's {variants[0]}, whose effect is no plain sum of weights: {MERGE}"
    if is_adapted(layer.base_layer):
        return f"is adapted twice, one adapter around another: {MERGE}"
    return ""


def effective(module: nn.Module, name: str) -> Tensor:
    """Return the weight or bias that a module computes with, laid out as its parameter, differentiable in all that make
    it."""
    plain: Tensor = getattr(base_of(module), name)
    for layer, adapter in _acting(module):
        if name == "weight":
            plain = plain + layer.get_delta_weight(adapter).to(plain.dtype)
        elif layer.lora_bias.get(adapter, False):
            plain = plain + (layer.lora_B[adapter].bias * layer.scaling[adapter]).to(plain.dtype)
    return plain


def parts(module: nn.Module, name: str) -> list[Tensor]:
    """Return the tensors that are multiplied where the rows of an effective weight or bias are: its own, and each
    adapter's B.

    Of a merged adapter too: what `unmerge()` takes off again must be what now lies in the base.
    """
    found: list[Tensor] = [underlying(base_of(module), name)]
    if is_adapted(module):
        layer: Any = module
        for adapter in [*layer.merged_adapters] if layer.merged else _active(layer):
            found += [p for n, p in layer.lora_B[adapter].named_parameters() if n == name]
    return found


def underlying(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter below a parametrization, or the parameter itself."""
    chain: Any = getattr(module, "parametrizations", {})
    return chain[name].original if name in chain else getattr(module, name)


def adapters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of adapters on a module that are matrices, without those of the plain layer."""
    if not is_adapted(module):
        return []
    own = {id(p) for p in base_of(module).parameters()}
    return [p for p in module.parameters() if id(p) not in own and p.dim() > 1]


def trains(module: nn.Module, name: str) -> bool:
    """Return whether an effective weight can still change: its parameter, or that of an adapter that acts, has a
    gradient."""
    if underlying(base_of(module), name).requires_grad:
        return True
    return any(
        p.requires_grad
        for layer, a in _acting(module)
        for p in (*layer.lora_A[a].parameters(), *layer.lora_B[a].parameters())
    )


def _acting(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Return the adapters whose effect is added to the base in a call, each with its layer."""
    if not is_adapted(module):
        return
    layer: Any = module
    if not layer.merged and not layer.disable_adapters:
        for name in _active(layer):
            yield layer, name


def _active(layer: Any) -> list[str]:
    held = getattr(layer, "lora_A", {})
    return [name for name in layer.active_adapters if name in held]
