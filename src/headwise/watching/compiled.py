"""The one operator by which a compiled graph shows a call to its observer; the graph holds no state and no break."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.core.call import Call

if TYPE_CHECKING:
    from headwise.watching.recorder import SiteObserver

_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, SiteObserver] = weakref.WeakValueDictionary()


def enroll(observer: SiteObserver) -> int:
    """Give an observer the number by which compiled graphs find it."""
    number = next(_numbers)
    _observers[number] = observer
    return number


def observe(seen: Tensor, number: int, call: Call, out: Tensor) -> None:
    """Show a call from inside a graph that is being compiled."""
    tensors = [call.q, call.k, call.v, out]
    hidden = call.hidden
    optional = [None if t is None else t.detach() for t in (call.mask, call.sinks, hidden)]
    observed(
        seen, number, *[t.detach() for t in tensors], *optional, call.causal, call.scale, call.softcap, call.training
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
    causal: bool,
    scale: float,
    softcap: float | None,
    training: bool,
) -> None:
    """Bring the tensors of a call to the observer with this number when the graph runs."""
    seen.add_(1)
    observer = _observers.get(number)
    if observer is None:
        return
    call = Call(
        observer.fitted,
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
    )
    observer.recorder.take(call, out)


@observed.register_fake
def _(*arguments: object) -> None:
    return None
