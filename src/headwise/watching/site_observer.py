"""The observer of one site: it brings the site's calls to the recorder, from eager code and from compiled graphs."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor, nn

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.call import Call
from headwise.watching.recorder import Recorder
from headwise.watching.stream import Stream

# Compiled graphs hold a number and never the observer.
_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, SiteObserver] = weakref.WeakValueDictionary()


class SiteObserver:
    """Stands at one site and brings its calls to the recorder."""

    def __init__(self, place: FittedLayer, recorder: Recorder, model: nn.Module) -> None:
        self.place, self.recorder = place, recorder
        # A compiled graph keeps an operator only for what it changes: it counts its calls here.
        self.seen = torch.zeros((), dtype=torch.int64)
        self.number = next(_numbers)
        _observers[self.number] = self
        self.stream = Stream(place, model, self.left) if recorder.reads_streams else None

    def __call__(self, call: Call, out: Tensor) -> None:
        """Take a call; called by the site after its output is computed."""
        stream = None if self.stream is None else self._of_samples(self.stream.take())
        if torch.compiler.is_compiling():
            observe(self.seen, self.number, call, out, stream)
        else:
            self.take(call, out, stream)

    def _of_samples(self, stream: Tensor | None) -> Tensor | None:
        """Return the residual stream of packed rows as that of their sequences."""
        packed = self.place.packing.look()
        return packed.unpack(stream) if packed is not None and stream is not None and packed.holds(stream) else stream

    def left(self, stream: Tensor | None) -> None:
        """Take what leaves the block around the site."""
        stream = self._of_samples(stream)
        assert stream is not None
        if torch.compiler.is_compiling():
            left(self.seen, self.number, stream)
        else:
            self.take_left(stream)

    def take(self, call: Call, out: Tensor, stream: Tensor | None) -> None:
        """Bring a call with its output and what entered its block to the recorder."""
        self.recorder.take(call, out, self.stream, stream)

    def take_left(self, stream: Tensor) -> None:
        """Bring what left the block to the recorder."""
        self.recorder.take_final(self.place.site, stream)

    def remove(self) -> None:
        """Take the hooks around the site off."""
        if self.stream is not None:
            self.stream.remove()


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
    """Bring the tensors of a call to the observer with this number when the graph runs."""
    # An operator that changes nothing and gives nothing would be cut out of the graph.
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
    """Bring what leaves a block to the observer with this number when the graph runs."""
    seen.add_(1)
    observer = _observers.get(number)
    if observer is not None:
        observer.take_left(stream)


@left.register_fake
def _(*arguments: object) -> None:
    return None
