"""The choice between a Triton kernel and the PyTorch form of the same computation."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.borders import in_transform, overwritable_library

# "0" computes everything by the PyTorch forms, to compare them or to work around a fault of a kernel.
SWITCH = "HEADWISE_KERNELS"
# Triton comes with the CUDA builds of torch. Looked up here, because torch.compile traces neither the search for a
# module nor a cached function, and compiled calls ask.
HAS_TRITON = importlib.util.find_spec("triton") is not None
# torch without CUDA cannot ask whether a stream is captured.
HAS_CUDA = torch.backends.cuda.is_built()


def capturing() -> bool:
    """Return whether kernels are recorded into a CUDA graph now instead of run."""
    return HAS_CUDA and torch.cuda.is_current_stream_capturing()


def kernels_run_on(device: torch.device) -> bool:
    """Return whether Triton kernels compute on this device: on CUDA, with Triton, unless `HEADWISE_KERNELS` is 0."""
    return HAS_TRITON and device.type == "cuda" and os.environ.get(SWITCH) != "0"


# Asked by what calls an operator only where a kernel computes it; counting programs say yes without Triton.
operators_run_on = kernels_run_on

# The dtypes that the kernels of rows read.
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_by_kernel(*tensors: torch.Tensor) -> bool:
    """Return whether a kernel computes on rows of these tensors now, and not the PyTorch form.

    A compiled graph fuses the PyTorch form by itself, and transforms of torch.func differentiate no kernel.
    """
    first = tensors[0]
    return (
        first.is_cuda
        and not torch.compiler.is_compiling()
        and operators_run_on(first.device)
        and not in_transform()
        and all(x.dtype in ROW_DTYPES and x.numel() > 0 and x.is_cuda for x in tensors)
    )


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function an operator of this package, which has no gradient.

    An operator, so that programs that count or trace operators see one; torch's decorator for operators with gradients
    takes five times as long for each call.

    Args:
        schema: name and types, `name(Tensor x) -> Tensor`.
        fake: the same function for tensors without numbers.
    """

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"headwise::{schema.partition('(')[0]}"
        library = overwritable_library(*name.split("::"))
        torch.library.define(name, schema[schema.index("(") :], lib=library)
        torch.library.impl(name, ("cpu", "cuda"), function, lib=library)
        torch.library.register_fake(name, fake, lib=library)
        packet = getattr(torch.ops.headwise, name.removeprefix("headwise::"))
        return packet.default  # type: ignore[no-any-return]  # torch's own is untyped

    return made


def gradients_again(
    form: Callable[..., Any], inputs: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients of a PyTorch form, differentiable once more, where those of a kernel are not.

    Args:
        form: computes one tensor or several from the inputs.
        inputs: what a backward saved of the forward's inputs.
        grads: the gradients of the results.
    """
    with torch.enable_grad():
        results = form(*inputs)
        results = (results,) if isinstance(results, torch.Tensor) else results
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


# of a head, which a tile holds whole
LARGEST_SIZE = 256


def plain(*tensors: Tensor) -> bool:
    """Return whether kernels of attention read these q, k and v (B, H, T, D).

    They need one dtype of fp32, fp16 and bf16, head sizes up to 256, and a number of key heads that divides that of the
    query heads.
    """
    kinds = {x.dtype for x in tensors}
    return (
        len(kinds) == 1
        and kinds <= {torch.float32, torch.float16, torch.bfloat16}
        and max(x.shape[-1] for x in tensors) <= LARGEST_SIZE
        and all(x.numel() > 0 for x in tensors)
        and all(tensors[0].shape[1] % x.shape[1] == 0 for x in tensors)
    )


def as_hosts(x: Tensor, heads: int, rows: int) -> Tensor:
    """Return an empty tensor (B, heads, rows, D) for the batch and head size of x that lies as (B, rows, heads, D)."""
    return x.new_empty(x.shape[0], rows, heads, x.shape[3]).transpose(1, 2)


def rows_first(x: Tensor) -> Tensor:
    """Return x (B, H, T, D), copied if it does not lie as (B, T, H, D), the order in which hosts read it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
