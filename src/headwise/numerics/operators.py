"""How headwise's own operators are called: as registered ones where operators are seen, else without the registry.

A call of an operator that is registered with `torch.library` costs some 100 µs of the host, and its gradient more; a
plain `torch.autograd.Function` costs a third (docs/log.md, Attend). Small models are bound by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headwise.borders import in_transform, modes_see_operators
from headwise.numerics.kernels import as_hosts, note, rows_first

PLAIN = (Tensor, nn.Parameter)
_nothing = nullcontext()


def calls_are_seen(*tensors: Tensor) -> bool:
    """Return whether a call must be one registered operator.

    So it must for compilers and exports, for transforms of torch.func, for modes that count or trace operators, and for
    subclasses of tensors, such as fake or distributed ones.
    """
    if torch.compiler.is_compiling():
        return True
    traced = modes_see_operators() or in_transform() or torch.jit.is_tracing()
    return traced or any(type(x) not in PLAIN for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast, which would compute products of fp32 in half precision, is off.

    Where it is off anyway nothing is entered, which would cost more than a small kernel.
    """
    on = torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else _nothing


class AttentionOperator:
    """A computation of attention that never holds the matrix, as one differentiable operator NAME of this package.

    Called where operators are seen it is the registered one, else a `torch.autograd.Function`. Outputs and gradients
    of the registered ones lie in memory as hosts read them, (B, T, H, D).

    Attributes:
        registered: the operator.
        backward: NAME_backward(Tensor?[] grads, Tensor[] saved, *settings) -> Tensor[], the gradients of the first
            inputs; empty where there is none.
    """

    def __init__(
        self,
        schema: str,
        compute: Callable[..., tuple[Tensor, ...]],
        slopes: Callable[..., Sequence[Tensor]],
        again: Callable[..., Sequence[Tensor | None]],
        *,
        like: Callable[..., tuple[Tensor, ...]],
        settings: str = "Tensor? mask, bool causal, float scale",
        learned: int = 3,
        keep: Callable[..., tuple[Sequence[Tensor], tuple[Any, ...]]] | None = None,
        slopes_like: Callable[..., Sequence[Tensor]] | None = None,
        frozen: int | None = None,
    ) -> None:
        """Register the operator and its backward.

        Args:
            schema: name, inputs and outputs, `name(Tensor q, Tensor k, Tensor v, ...) -> (Tensor, Tensor)`.
            compute: the outputs (B, H, T, Dv), (B, H, T), ... of the inputs.
            slopes: the gradients of the first inputs, of (gradients of the outputs, saved, *settings); the gradient of
                an unused output is None.
            again: the same with a graph, for `create_graph=True`, of whole matrices; None for inputs that need none.
            like: empty outputs of the inputs.
            settings: the types of what backward gets beside tensors.
            learned: how many of the inputs get gradients.
            keep: what backward gets, saved and settings, of (ctx, inputs, outputs); by default q, k, v and the outputs,
                and all other inputs.
            slopes_like: empty gradients of (saved, *settings), by default like q, k and v.
            frozen: the number of an output without gradient.
        """
        name, _, rest = schema.partition("(")
        self._name = name
        self._compute, self._slopes, self._again, self._learned = compute, slopes, again, learned
        self._keep, self._frozen = keep or _all_kept, frozen
        self._others = (None,) * (rest[: rest.index(")")].count(",") + 1 - learned)
        slopes_like = slopes_like or _like_saved

        def registered(*inputs: Any) -> tuple[Tensor, ...]:
            out, *rows = compute(*inputs)
            return rows_first(out), *rows

        def backward(grads: Sequence[Tensor | None], saved: Sequence[Tensor], *given: Any) -> list[Tensor]:
            return [rows_first(x) if x.dim() == 4 else x for x in slopes(grads, saved, *given)]

        define = torch.library.custom_op
        self.registered = define(f"headwise::{name}", registered, mutates_args=(), schema=f"({rest}")
        self.registered.register_fake(like)
        self.registered.register_autograd(self._gradients, setup_context=self._save)
        of_backward = f"(Tensor?[] grads, Tensor[] saved, {settings}) -> Tensor[]"
        self.backward = define(f"headwise::{name}_backward", backward, mutates_args=(), schema=of_backward)
        self.backward.register_fake(lambda grads, saved, *given: list(slopes_like(saved, *given)))
        operator = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
                output = compute(*inputs)
                operator._save(ctx, inputs, output)
                return output

            backward = staticmethod(self._gradients)

        self._function = Function.apply

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs."""
        note(self._name, inputs[0])
        if calls_are_seen(*inputs[: self._learned]):
            return self.registered(*inputs)
        return self._function(*inputs) if torch.is_grad_enabled() else self._compute(*inputs)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        saved, ctx.settings = self._keep(ctx, inputs, output)
        ctx.save_for_backward(*saved)
        if self._frozen is not None:
            ctx.mark_non_differentiable(output[self._frozen])
        # Gradients of unused outputs stay None instead of becoming zeros, so that their terms are skipped.
        ctx.set_materialize_grads(False)

    def _gradients(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in grads):
            return *(None,) * self._learned, *self._others
        saved, found = list(ctx.saved_tensors), None
        if torch.is_grad_enabled():
            found = self._again(grads, saved, *ctx.settings)
        elif calls_are_seen(*saved[:3]):
            found = self.backward(list(grads), saved, *ctx.settings)
        else:
            found = self._slopes(grads, saved, *ctx.settings)
        return *found, *self._others


def _all_kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Sequence[Tensor], Any]:
    return (*inputs[:3], *output), inputs[3:]


def _like_saved(saved: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [as_hosts(x, x.shape[1], x.shape[2]) for x in saved[:3]]


def rows_like(q: Tensor, v: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return an empty output of attention, and `count` empty numbers of its rows, (B, H, T) in fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return as_hosts(v, q.shape[1], q.shape[2]), *(q.new_empty(q.shape[:3], dtype=wide) for _ in range(count))
