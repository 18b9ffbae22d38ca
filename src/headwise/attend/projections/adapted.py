"""The effective weight of a layer with peft's adapters.

LoRA's effective weight is base + sum of scale * B A over the active adapters. Adapters whose effect cannot be written
as one weight are refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from headwise.borders import lora_convolution, own_modules

# Without an import of peft by the user, no such layer exists, and nothing merges into a weight behind its module.
MERGERS = "peft.tuners.tuners_utils"
MERGE = "merge the adapters into plain weights first (merge_and_unload())"


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer of peft that wraps a plain layer."""
    known = sys.modules.get(MERGERS)
    return known is not None and isinstance(module, known.BaseTunerLayer) and "base_layer" in own_modules(module)


def base_of(module: nn.Module) -> nn.Module:
    """Return the plain layer inside adapters, or the module itself."""
    while is_adapted(module):
        module = module.get_submodule("base_layer")
    return module


def obstacle(module: nn.Module) -> str:
    """Return why a module has no single effective weight, as the end of a sentence, or an empty string."""
    if not is_adapted(module):
        return ""
    layer: Any = module
    if layer.merged or layer.disable_adapters:
        return obstacle(layer.base_layer)
    kind = type(module)
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or not isinstance(module, lora.Linear | lora_convolution(lora)):
        return (
            f"is adapted by peft's {kind.__module__.split('.')[-2]} {kind.__name__}, whose effect is not a single "
            f"weight: {MERGE}"
        )
    variants = [type(layer.lora_variant[name]).__name__ for name in _active(layer) if name in layer.lora_variant]
    if variants:
        return f"is adapted by LoRA's {variants[0]}, whose effect is not a plain sum of weights: {MERGE}"
    if is_adapted(layer.base_layer):
        return f"is adapted twice, one adapter around another: {MERGE}"
    return ""


def effective(module: nn.Module, name: str) -> Tensor:
    """Return the effective weight or bias of a module in its parameter's layout, differentiable in all its parts."""
    tensor: Tensor = getattr(base_of(module), name)
    for layer, adapter in _unmerged(module):
        if name == "weight":
            tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
        elif layer.lora_bias.get(adapter, False):
            tensor = tensor + (layer.lora_B[adapter].bias * layer.scaling[adapter]).to(tensor.dtype)
    return tensor


def parts(module: nn.Module, name: str) -> list[Tensor]:
    """Return the tensors to multiply in order to scale rows of an effective weight or bias: its own and each B.

    Merged adapters are included: `unmerge()` must subtract what is now in the base.
    """
    tensors: list[Tensor] = [underlying(base_of(module), name)]
    if is_adapted(module):
        layer: Any = module
        for adapter in [*layer.merged_adapters] if layer.merged else _active(layer):
            tensors += [p for n, p in layer.lora_B[adapter].named_parameters() if n == name]
    return tensors


def underlying(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter below a parametrization, or the parameter itself."""
    chain: Any = getattr(module, "parametrizations", {})
    return chain[name].original if name in chain else getattr(module, name)


def originals(module: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters from which a weight is computed: several below torch's weight_norm, else one."""
    chain: Any = getattr(module, "parametrizations", {})
    if name not in chain or chain[name].is_tensor:
        return [underlying(module, name)]
    return [getattr(chain[name], f"original{at}") for at in range(chain[name].ntensors)]


def adapters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the matrix parameters of a module's adapters, without those of the plain layer."""
    if not is_adapted(module):
        return []
    own = {id(p) for p in base_of(module).parameters()}
    return [p for p in module.parameters() if id(p) not in own and p.dim() > 1]


def trains(module: nn.Module, name: str) -> bool:
    """Return whether training can change an effective weight: its parameter or an active adapter's requires grad."""
    if any(original.requires_grad for original in originals(base_of(module), name)):
        return True
    return any(
        p.requires_grad
        for layer, a in _unmerged(module)
        for p in (*layer.lora_A[a].parameters(), *layer.lora_B[a].parameters())
    )


def _unmerged(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield (layer, name) of each adapter that is added to the base in a call."""
    if not is_adapted(module):
        return
    layer: Any = module
    if not layer.merged and not layer.disable_adapters:
        for name in _active(layer):
            yield layer, name


def _active(layer: Any) -> list[str]:
    adapters = getattr(layer, "lora_A", {})
    return [name for name in layer.active_adapters if name in adapters]
