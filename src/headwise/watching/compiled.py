"""The one operator by which a compiled graph shows a call to its observer; the graph holds no state and no break."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from headwise.core.call import Call, CallContext


class Observing(Protocol):
    """An observer of a site, as compiled graphs call it when they run."""

    @property
    def context(self) -> CallContext:
        """Give what a call asks of the site it passes through."""
        ...

    def take(self, call: Call, out: Tensor, stream: Tensor | None) -> None:
        """Take a call with its output and what entered its block."""
        ...

    def take_left(self, stream: Tensor) -> None:
        """Take what left the block around the site."""
        ...


_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, Observing] = weakref.WeakValueDictionary()


def enroll(observer: Observing) -> int:
    """Give an observer the number by which compiled graphs find it."""
    number = next(_numbers)
    _observers[number] = observer
    return number


def observe(seen: Tensor, number: int, call: Call, out: Tensor, stream: Tensor | None = None) -> None:
    """Show a call from inside a graph that is being compiled."""
    tensors = [call.q, call.k, call.v, out]
    hidden = call.hidden
    optional = [None if t is None else t.detach() for t in (call.mask, call.sinks, hidden, stream)]
    observed(
        seen,
        number,
        *[t.detach() for t in tensors],
        *optional,
        call.causal,
        call.scale,
        call.softcap,
        call.training,
        call.is_cross,
    )


@torch.library.custom_op("headwise::observed", mutates_args={"seen"})
def observed(
    seen: Tensor,
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    hidden: Tensor | None,
    stream: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    training: bool,
    cross: bool,
) -> None:
    """Bring the tensors of a call to the observer with this number when the graph runs."""
    # An operator that changes nothing and gives nothing would be cut out of the graph.
    seen.add_(1)
    observer = _observers.get(number)
    if observer is None:
        return
    call = Call(
        observer.context,
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        training=training,
        hidden=hidden,
        cross=cross,
    )
    observer.take(call, out, stream)


@observed.register_fake
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op("headwise::left", mutates_args={"seen"})
def left(seen: Tensor, number: int, stream: Tensor) -> None:
    """Bring what leaves a block to the observer with this number when the graph runs."""
    seen.add_(1)
    observer = _observers.get(number)
    if observer is not None:
        observer.take_left(stream)


@left.register_fake
def _(*arguments: object) -> None:
    return None
