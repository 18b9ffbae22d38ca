"""Observer that passes the calls of one site to the recorder, from eager code and from compiled graphs."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor, nn

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.call import Call
from headwise.watching.recorder import Recorder
from headwise.watching.stream import Stream

# A compiled graph refers to an observer by its number and never to the object.
_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, SiteObserver] = weakref.WeakValueDictionary()


class SiteObserver:
    """Observer of one site that passes its calls to the recorder."""

    def __init__(self, place: FittedLayer, recorder: Recorder, model: nn.Module) -> None:
        self.place, self.recorder = place, recorder
        # The operators below count their calls here: a compiled graph removes an operator without an effect.
        self.seen = torch.zeros((), dtype=torch.int64)
        self.number = next(_numbers)
        _observers[self.number] = self
        self.stream = Stream(place, model, self.left) if recorder.reads_streams else None

    def __call__(self, call: Call, out: Tensor) -> None:
        """Observe a call; the site calls this after computing its output."""
        stream = None if self.stream is None else self._of_samples(self.stream.take())
        if torch.compiler.is_compiling():
            observe(self.seen, self.number, call, out, stream)
        else:
            self.take(call, out, stream)

    def _of_samples(self, stream: Tensor | None) -> Tensor | None:
        """Return the residual stream by sequence if its rows are packed, else as it is."""
        packed = self.place.packing.look()
        return packed.unpack(stream) if packed is not None and stream is not None and packed.holds(stream) else stream

    def left(self, stream: Tensor | None) -> None:
        """Observe the output of the block around the site."""
        stream = self._of_samples(stream)
        assert stream is not None
        if torch.compiler.is_compiling():
            left(self.seen, self.number, stream)
        else:
            self.take_left(stream)

    def take(self, call: Call, out: Tensor, stream: Tensor | None) -> None:
        """Pass a call, its output and the input of its block to the recorder."""
        self.recorder.take(call, out, self.stream, stream)

    def take_left(self, stream: Tensor) -> None:
        """Pass the output of the block to the recorder."""
        self.recorder.take_final(self.place.site, stream)

    def remove(self) -> None:
        """Remove the hooks around the site."""
        if self.stream is not None:
            self.stream.remove()


def observe(seen: Tensor, number: int, call: Call, out: Tensor, stream: Tensor | None = None) -> None:
    """Record a call in a graph that is being compiled."""
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
        [] if call.text is None else [call.text.start, call.text.stop],
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
    text: list[int],
) -> None:
    """Pass the tensors of a call to the observer with this number when the graph runs."""
    # An operator that changes and returns nothing would be removed from the graph.
    seen.add_(1)
    observer = _observers.get(number)
    if observer is None:
        return
    call = Call(
        observer.place,
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
        text=slice(*text) if text else None,
    )
    observer.take(call, out, stream)


@observed.register_fake
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op("headwise::left", mutates_args={"seen"})
def left(seen: Tensor, number: int, stream: Tensor) -> None:
    """Pass the output of a block to the observer with this number when the graph runs."""
    seen.add_(1)
    observer = _observers.get(number)
    if observer is not None:
        observer.take_left(stream)


@left.register_fake
def _(*arguments: object) -> None:
    return None
