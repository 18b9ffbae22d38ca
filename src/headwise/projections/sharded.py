"""Sharded: weights of which this process holds a part in a form that cannot be read or written as the layer's weight.

FSDP2 keeps shards that give the whole weight when asked, and is no case of these.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from headwise.core.remedies import LEAVE_OUT
from headwise.projections.adapted import base_of

FSDP1 = (
    "is flattened and sharded by FSDP1, which gives the whole weight in forwards alone: use FSDP2 (fully_shard; "
    "fsdp_version: 2 in accelerate) or DDP"
)
ZERO3 = (
    "is partitioned by DeepSpeed ZeRO-3, which gives the whole weight in forwards alone: use ZeRO stage 2, FSDP2 or DDP"
)
TENSOR_PARALLEL = (
    "its heads are split over processes (tensor parallelism), and methods need all heads of a layer: use FSDP2 "
    "(fully_shard) or DDP, or leave the attention layers out of the plan for tensor parallelism"
)
CONTEXT_PARALLEL = (
    "its tokens are split over processes (context parallelism), and methods need all tokens of a sample: train without "
    f"context_parallel, or {LEAVE_OUT}"
)


def sharded(module: nn.Module, name: str) -> str:
    """Say that a weight is kept in shards that only a forward puts together: the end of a sentence; else empty."""
    base = base_of(module)
    chain: Any = getattr(base, "parametrizations", {})
    owner, key = (chain[name], "original") if name in chain else (base, name)
    parameter = owner._parameters.get(key)
    # Without use_orig_params FSDP1 leaves views of its flat parameter, plain tensors, in the parameter's place.
    if getattr(parameter, "_fsdp_flattened", False) or (
        parameter is None and isinstance(owner.__dict__.get(key), Tensor)
    ):
        return FSDP1
    return ZERO3 if hasattr(parameter, "ds_id") else ""


def below(module: nn.Module) -> str:
    """Say that a weight at or below a module is kept in such shards."""
    for inner in module.modules():
        if "_flat_param" in inner._parameters:
            return FSDP1
        for name in ("weight", *inner._parameters):
            if reason := sharded(inner, name):
                return reason
    return ""


def heads_split(module: nn.Module, model: nn.Module | None) -> str:
    """Say that tensor parallelism gives this process a part of an attention layer's heads; else empty."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return TENSOR_PARALLEL
    split = max((_dimensions(parameter) for parameter in module.parameters()), default=0)
    # FSDP2 itself splits over one dimension of the mesh.
    return TENSOR_PARALLEL if split > _fsdp2(model) else ""


def _dimensions(parameter: Any) -> int:
    """Return over how many dimensions of its mesh a distributed tensor is split; 0 for a plain one."""
    return sum(place.is_shard() for place in getattr(parameter, "placements", ()))


def _fsdp2(model: nn.Module | None) -> bool:
    known = sys.modules.get("torch.distributed.fsdp")
    return model is not None and known is not None and any(isinstance(m, known.FSDPModule) for m in model.modules())


def tokens_split(q: Tensor) -> bool:
    """Return whether context parallelism is on: it stands in the place of fused attention, or gives it distributed
    tensors."""
    # Read only where torch's own module for it was imported: nothing is replaced otherwise.
    known = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    replaced = getattr(known, "_replaced_functions", ())
    return functional.scaled_dot_product_attention in replaced or hasattr(q, "full_tensor")
