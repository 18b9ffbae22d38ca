"""Attention with logits that a method edits, by kernels that never store the matrix; the PyTorch form is the matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.borders import in_transform, modes_see_operators
from headwise.numerics import kernels
from headwise.numerics.kernels import as_hosts, plain


def edits_run(*tensors: Tensor) -> bool:
    """Return whether the kernels compute attention of these q, k and v; elsewhere the matrix is computed."""
    if not kernels.operators_run_on(tensors[0].device) or in_transform():
        return False
    # ONNX and other runtimes do not have our operator.
    if torch.compiler.is_exporting():
        return False
    # Second derivatives need the math kernel, and then the matrix. Compiled graphs cannot ask.
    if not torch.compiler.is_compiling() and not torch.backends.cuda.flash_sdp_enabled():
        return False
    return plain(*tensors)


def attend_edited(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, kind: str, by: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (A v, log-sum-exp), (B, H, T, Dv) and (B, H, T) in fp32, of a call for which `edits_run` is True.

    With s the logits, scaled and with an additive mask, and c = `by`, A is the softmax of

    - "cap": c·tanh(s / c), c 0-d; keys that an additive mask forbids by -9,000 or less stay forbidden;
    - "past", "between": s + c_i - c_j and s - |c_i - c_j|, c (B, N, H) in fp32, with a gradient; T = N;
    - "stable": s, where the exponents of rows whose largest logit repeats are lowered as `StableSoftmax` does with
      beta c, 0-d on the host.

    With "pick" A is relu(exp(s) - 1) over c plus the row's sum of |exp(s) - 1|, c 0-d on the host, and the log-sum-exp
    is the logarithm of that number. Else it is that of the edited logits; 0 in a row without keys.

    Args:
        q, k, v: (B, H, T, D), (B, H, N, D), (B, H, N, Dv).
        mask: broadcastable to (B, H, T, N), bool (True: allowed) or added to the logits; it gets no gradient.
        causal: whether query i sees keys 0..i only, in addition to the mask.
        scale: factor of the products of queries and keys.
        kind, by: the edit, as above.
    """
    # An operator costs some ten times the host's time of a Function, but graphs and modes see it.
    attend = _operator if _seen(q) else _Attend.apply
    return attend(q, k, v, mask, causal, scale, kind, by)  # type: ignore[no-any-return, no-untyped-call]


def _seen(x: Tensor) -> bool:
    """Return whether a graph or a mode sees operators, or x is fake."""
    return torch.compiler.is_compiling() or type(x) is not Tensor or modes_see_operators()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, kind: str, by: Tensor
) -> tuple[Tensor, Tensor]:
    from headwise.attend.attention import triton_edited

    return triton_edited.forward(q, k, v, mask, causal, scale, kind, by)


_operator = torch.library.custom_op("headwise::attend_edited", _forward, mutates_args=())


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, kind: str, by: Tensor
) -> tuple[Tensor, Tensor]:
    return as_hosts(v, q.shape[1], q.shape[2]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    g_out: Tensor | None,
    g_lse: Tensor | None,
    saved: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and `by`, the last empty where it has none.

    `saved` is q, k, v, the outputs and `by`.
    """
    from headwise.attend.attention import triton_edited

    return triton_edited.backward(g_out, g_lse, saved, mask, causal, scale, kind)


_operator_of_backward = torch.library.custom_op("headwise::attend_edited_backward", _backward, mutates_args=())


@_operator_of_backward.register_fake
def _(
    g_out: Tensor | None,
    g_lse: Tensor | None,
    saved: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, *_, by = saved
    dq, dk, dv = (as_hosts(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    return dq, dk, dv, by.new_empty(by.shape if by.dim() else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.mask, ctx.causal, ctx.scale, ctx.kind, by = inputs
    # Cloned: set() writes the next step's cap into the same tensor, possibly before backward reads it.
    ctx.save_for_backward(q, k, v, *output, by.clone() if ctx.kind == "cap" else by)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g_out: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if g_out is None and g_lse is None:
        return (None,) * 8
    saved = list(ctx.saved_tensors)
    run = _operator_of_backward if _seen(saved[0]) else _backward
    *gradients, of_numbers = run(g_out, g_lse, saved, ctx.mask, ctx.causal, ctx.scale, ctx.kind)
    return (*gradients, *(None,) * 4, of_numbers if of_numbers.numel() else None)


_operator.register_autograd(_gradients, setup_context=_save)


class _Attend(torch.autograd.Function):
    """The operator for eager tensors, without the operator's cost."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, which cannot be differentiated again."""
        again = torch.is_grad_enabled()
        with torch.no_grad():
            gradients = _gradients(ctx, *of_outputs)
        if not again or gradients[0] is None:
            return gradients
        dq, dk, dv = Once.apply(ctx.saved_tensors[0], *gradients[:3])  # type: ignore[no-untyped-call]
        return (dq, dk, dv, *gradients[3:])


class Once(torch.autograd.Function):
    """Gradients that say, when they are differentiated, what computes second derivatives."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients."""
        return tuple(x.detach() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Raise RuntimeError with the remedy."""
        raise RuntimeError(
            "attention with edited logits or mixed heads has no second derivative in a kernel: run the forward under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which takes the matrix"
        )
