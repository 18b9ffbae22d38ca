"""Attention with logits that a method edits, by kernels that never store the matrix; the PyTorch form is the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.borders import in_transform
from headwise.numerics import kernels
from headwise.numerics.kernels import as_hosts, plain
from headwise.numerics.operators import AttentionOperator, rows_like


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
    attended: tuple[Tensor, Tensor] = _operator(q, k, v, by, mask, causal, scale, kind)
    return attended


def _forward(
    q: Tensor, k: Tensor, v: Tensor, by: Tensor, mask: Tensor | None, causal: bool, scale: float, kind: str
) -> tuple[Tensor, Tensor]:
    from headwise.attend.attention import triton_edited

    return triton_edited.forward(q, k, v, mask, causal, scale, kind, by)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    q, k, v, by, *settings = inputs
    # Cloned: set() writes the next step's cap into the same tensor, possibly before backward reads it.
    return (q, k, v, *output, by.clone() if settings[-1] == "cap" else by), tuple(settings)


def _backward(
    grads: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float, kind: str
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and `by`, the last empty where it has none."""
    from headwise.attend.attention import triton_edited

    of_out, of_lse = grads
    return triton_edited.backward(of_out, of_lse, saved, mask, causal, scale, kind)


def _again(
    grads: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float, kind: str
) -> list[Tensor]:
    """Return the same gradients, of which those of q, k and v cannot be differentiated again."""
    with torch.no_grad():
        *found, of_by = _backward(grads, saved, mask, causal, scale, kind)
    return [*Once.apply(saved[0], *found), of_by]  # type: ignore[no-untyped-call]


def _gradients_like(saved: Sequence[Tensor], *_: Any) -> list[Tensor]:
    by = saved[-1]
    return [*(as_hosts(x, x.shape[1], x.shape[2]) for x in saved[:3]), by.new_empty(by.shape if by.dim() else (0,))]


_operator = AttentionOperator(
    "attend_edited(Tensor q, Tensor k, Tensor v, Tensor by, Tensor? mask, bool causal, float scale, str kind) "
    "-> (Tensor, Tensor)",
    _forward,
    _backward,
    _again,
    like=lambda q, k, v, *_: rows_like(q, v, 1),
    settings="Tensor? mask, bool causal, float scale, str kind",
    learned=4,
    keep=_keep,
    slopes_like=_gradients_like,
)


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
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which builds the matrix"
        )
