"""The observer of one site: it brings the site's calls to the recorder, from eager code and from compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.core.call import Call
from headwise.watching.compiled import enroll, left, observe
from headwise.watching.places import WatchedSite
from headwise.watching.recorder import Recorder
from headwise.watching.stream import Stream


class SiteObserver:
    """Stands at one site and brings its calls to the recorder."""

    def __init__(self, place: WatchedSite, recorder: Recorder, model: nn.Module) -> None:
        self.place, self.recorder = place, recorder
        # A compiled graph keeps an operator only for what it changes: it counts its calls here.
        self.seen = torch.zeros((), dtype=torch.int64)
        self.number = enroll(self)
        self.stream = Stream(place, model, self.left) if recorder.reads_streams else None

    @property
    def context(self) -> WatchedSite:
        """Give what a call asks of the site it passes through."""
        return self.place

    def __call__(self, call: Call, out: Tensor) -> None:
        """Take a call; called by the site after its output is computed."""
        stream = None if self.stream is None else self.stream.take()
        if torch.compiler.is_compiling():
            observe(self.seen, self.number, call, out, stream)
        else:
            self.take(call, out, stream)

    def left(self, stream: Tensor) -> None:
        """Take what leaves the block around the site."""
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
