"""Detect weights that cannot be written as the layer's weight: sharded ones, and those that a hook computes.

FSDP2 is not one of these cases: its shards can be gathered to the full weight at any time.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from headwise.attend.projections.adapted import base_of
from headwise.borders import (
    PRUNED_NAME,
    forward_pre_hooks_of,
    has_flat_parameter,
    is_flattened,
    own_parameters,
    tensor_parallel_size,
)
from headwise.files.errors import LEAVE_OUT

FSDP1 = (
    "is flattened and sharded by FSDP1, which gathers the full weight only in forwards: use FSDP2 (fully_shard; "
    "fsdp_version: 2 in accelerate) or DDP"
)
ZERO3 = (
    "is partitioned by DeepSpeed ZeRO-3, which gathers the full weight only in forwards: use ZeRO stage 2, FSDP2 or DDP"
)
TENSOR_PARALLEL = (
    "its heads are split over processes (tensor parallelism), and methods need all heads of a layer: use FSDP2 "
    "(fully_shard) or DDP, or leave the attention layers out of the plan for tensor parallelism"
)
CONTEXT_PARALLEL = (
    "its tokens are split over processes (context parallelism), and methods need all tokens of a sample: train without "
    f"context_parallel, or {LEAVE_OUT}"
)


PLAIN_FIRST = "make it a plain parameter first"
COMPUTED = {
    "WeightNorm": "call torch.nn.utils.remove_weight_norm(layer)",
    "SpectralNorm": "call torch.nn.utils.remove_spectral_norm(layer)",
}


def sharded(module: nn.Module, name: str) -> str:
    """Return why a weight is no parameter that can be written, as the end of a sentence, or an empty string.

    Only a forward gathers it (FSDP1, ZeRO-3), or a hook computes it before each forward.
    """
    base = base_of(module)
    chain: Any = getattr(base, "parametrizations", {})
    owner, key = (chain[name], "original") if name in chain else (base, name)
    parameter = own_parameters(owner).get(key)
    if is_flattened(parameter):
        return FSDP1
    # Without use_orig_params, FSDP1 replaces the parameter by a plain tensor, a view of its flat parameter.
    if parameter is None and isinstance(owner.__dict__.get(key), Tensor):
        return _computed(owner, key) or FSDP1
    return ZERO3 if hasattr(parameter, "ds_id") else ""


def _computed(module: nn.Module, name: str) -> str:
    """Return which hook sets a weight before each forward, as the end of a sentence, or an empty string."""
    hooks = forward_pre_hooks_of(module).values()
    # torch.nn.utils.prune keeps the weight's name in the one, weight_norm and spectral_norm in the other
    hook = next((h for h in hooks if name in (getattr(h, PRUNED_NAME, None), getattr(h, "name", None))), None)
    if hook is None:
        return f"is set before each forward by a hook of {type(module).__name__}: {PLAIN_FIRST}" if hooks else ""
    kind = type(hook).__name__
    remedy = COMPUTED.get(kind, f"call torch.nn.utils.prune.remove(layer, {name!r})")
    return f"is computed before each forward by {kind} of torch.nn.utils ({name}), and a change of it is lost: {remedy}"


def below(module: nn.Module) -> str:
    """Return how a weight of a module or its submodules is sharded in this way, or an empty string."""
    for inner in module.modules():
        if has_flat_parameter(inner):
            return FSDP1
        for name in ("weight", *own_parameters(inner)):
            if reason := sharded(inner, name):
                return reason
    return ""


def heads_split(module: nn.Module, model: nn.Module | None) -> str:
    """Return a message if tensor parallelism splits the heads of an attention layer, or an empty string."""
    if tensor_parallel_size(model) > 1:
        return TENSOR_PARALLEL
    split = max((_dimensions(parameter) for parameter in module.parameters()), default=0)
    # FSDP2 itself shards over one dimension of the mesh.
    return TENSOR_PARALLEL if split > _fsdp2(model) else ""


def _dimensions(parameter: Any) -> int:
    """Return the number of mesh dimensions over which a tensor is sharded; 0 for a plain tensor."""
    return sum(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def _fsdp2(model: nn.Module | None) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return model is not None and fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())
