"""The choice between a Triton kernel and the PyTorch form of the same computation."""

from __future__ import annotations

import importlib
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
# Asked first: a build of torch for CUDA, on a machine without its driver, cannot say whether a stream is captured.
has_context = torch.cuda.is_initialized


def capturing() -> bool:
    """Return whether kernels are recorded into a CUDA graph now instead of run."""
    return has_context() and torch.cuda.is_current_stream_capturing()


def kernels_run_on(device: torch.device) -> bool:
    """Return whether Triton kernels compute on this device: on CUDA, with Triton, unless `HEADWISE_KERNELS` is 0."""
    return HAS_TRITON and device.type == "cuda" and os.environ.get(SWITCH) != "0"


# Asked by what calls an operator only where a kernel computes it; counting programs say yes without Triton.
operators_run_on = kernels_run_on

# The dtypes that the kernels of rows read.
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Gets the names of the kernels that run; what runs a layer or a whole model puts its own set here.
_names: set[str] | None = None


def note_into(names: set[str] | None) -> None:
    """Add the names of kernels that run from now on to this set, for a report; None: to none."""
    global _names
    _names = names


def note(name: str, x: torch.Tensor) -> None:
    """Note that an operator computes on x, if a kernel does so there. Graphs and gradients note nothing."""
    if torch.compiler.is_compiling() or _names is None or not x.is_cuda:
        return
    if x.dtype in ROW_DTYPES and operators_run_on(x.device):
        _names.add(name)


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
    takes five times as long for each call. The decorated function has the operator itself as `registered`.

    Args:
        schema: name and types, `name(Tensor x) -> Tensor`.
        fake: the same function for tensors without numbers.
    """

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        short = schema.partition("(")[0]
        name = f"headwise::{short}"
        library = overwritable_library(*name.split("::"))
        torch.library.define(name, schema[schema.index("(") :], lib=library)
        torch.library.impl(name, ("cpu", "cuda"), function, lib=library)
        torch.library.register_fake(name, fake, lib=library)
        run = getattr(torch.ops.headwise, short).default

        def noted(*inputs: Any) -> Any:
            if not short.endswith("_backward"):
                note(short, inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][0])
            return run(*inputs)

        noted.registered = run  # type: ignore[attr-defined]  # functions take attributes
        return noted

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


def by_kernel(
    schema: str,
    form: Callable[..., torch.Tensor],
    kernels: str,
    *,
    learned: int = 0,
    results: Callable[..., Any] | None = None,
    slopes: Callable[..., list[torch.Tensor]] | None = None,
) -> Callable[..., Any]:
    """Return a differentiable function that a pair of Triton kernels computes, each an operator of this package.

    The kernels' module has two functions with the operator's name: NAME(*inputs, made) fills the results, and
    NAME_backward(g, *inputs, made) the gradients of the first tensors. Where there are two results, backward gets them
    after the tensors; the second takes no gradient.

    Args:
        schema: name and types, `name(Tensor x, Tensor? y, float z) -> Tensor`, the tensors first.
        form: the same by operators of PyTorch, with the same inputs, for second derivatives.
        kernels: the module.
        learned: how many of the tensors get gradients; 0 for all.
        results: makes empty results from the inputs; by default one like the first.
        slopes: makes empty gradients from the inputs; by default each like its tensor.
    """
    name, arguments = schema[: schema.index(") ->")].split("(")
    given = arguments.split(", ")
    tensors, two = sum(x.startswith("Tensor") for x in given), schema.endswith("(Tensor, Tensor)")
    learned = learned or tensors
    none = (None,) * (len(given) - learned)
    results = results or (lambda first, *_: torch.empty_like(first))
    slopes = slopes or (lambda *inputs: [torch.empty_like(x) for x in inputs[:learned] if x is not None])
    saved_too = ["Tensor made", "Tensor extra"] if two else []
    of_backward = ", ".join(["Tensor g", *given[:tensors], *saved_too, *given[tensors:]])

    @operator(schema, results)
    def forward(*inputs: Any) -> Any:
        made = results(*inputs)
        getattr(importlib.import_module(kernels), name)(*inputs, made)
        return made

    @operator(f"{name}_backward({of_backward}) -> Tensor[]", lambda g, *inputs: slopes(*inputs))
    def backward(g: Tensor, *inputs: Any) -> list[Tensor]:
        made = slopes(*inputs)
        getattr(importlib.import_module(kernels), f"{name}_backward")(g, *inputs, made)
        return made

    class ByKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            made = forward(*inputs)
            ctx.settings = inputs[tensors:]
            if two:
                ctx.mark_non_differentiable(made[1])
            ctx.save_for_backward(*inputs[:tensors], *(made if two else ()))
            return made

        @staticmethod
        def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]  # torch's has no types
            saved = ctx.saved_tensors
            if torch.is_grad_enabled():
                rest = (*saved[learned:tensors], *ctx.settings)
                return *gradients_again(lambda *x: form(*x, *rest), saved[:learned], (g,)), *none
            found = backward(g, *saved, *ctx.settings)
            if len(found) < learned:
                given = iter(found)
                found = [None if x is None else next(given) for x in saved[:learned]]
            return *found, *none

    return ByKernel.apply  # type: ignore[no-any-return]  # torch's own is untyped


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
