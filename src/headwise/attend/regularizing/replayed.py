"""Detection of libraries that run a batch twice and restore torch's random state for the second time."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headwise.attend.core import Method
from headwise.borders import version_of
from headwise.files.user_warnings import warn

# Chunks of one step that are remembered: large batches are run in some hundreds.
CHUNKS = 2048

REPLAYED = (
    "a batch ran without gradients and again with them, from the same state of torch's generators, as GradCache and "
    "the cached losses of sentence-transformers do: {methods} drew other numbers the second time, so that gradients "
    "are wrong. Pass draws='torch' to regularize(). If the two runs need not be alike, run the first in eval mode"
)


class Replayed:
    """Warns once if a forward with gradients repeats a training forward without: its draws would differ.

    A generator never returns to a state by itself, so a return to that of an earlier forward is a replay. Where nothing
    has moved the generators, the same arguments in the same memory are one.
    """

    def __init__(self, methods: Sequence[Method], *, followed: bool) -> None:
        self.drawing = [method for method in methods if method.draws()]
        self.done = followed or not self.drawing
        self.seen: deque[tuple[int, list[Any]]] = deque(maxlen=CHUNKS)
        self.last: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Replayed:
        twin = object.__new__(Replayed)
        twin.drawing, twin.done, twin.seen, twin.last = self.drawing, self.done, deque(maxlen=CHUNKS), None
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"drawing": self.drawing, "done": self.done, "seen": deque(maxlen=CHUNKS), "last": None}

    def before(self, arguments: Iterable[Any], *, differentiates: bool) -> None:
        """Notice that a training forward with these arguments begins."""
        if self.done or (differentiates and not self.seen):
            return
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        state, inputs = _state(), [_identity(x) for x in tensors]
        if not differentiates:
            self.seen.append((state, inputs))
        elif any(state == earlier and (state != self.last or _same(inputs, of)) for earlier, of in self.seen):
            self.done = True
            self.seen.clear()
            warn(REPLAYED.format(methods=" + ".join(map(repr, self.drawing))))
        self.last = state

    def after(self) -> None:
        """Notice that a training forward without gradients ends."""
        if not self.done:
            self.last = _state()

    def stepped(self) -> None:
        """Forget the forwards before an optimizer step."""
        self.seen.clear()


def _state() -> int:
    """Return a hash of the states of torch's generators on the CPU and on the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return hash(tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states))


def _identity(x: Tensor) -> tuple[Any, ...] | None:
    """Return what two tensors with the same numbers in the same memory have in common, or None if unknown."""
    try:
        return StorageWeakRef(x.untyped_storage()), version_of(x), x.storage_offset(), x.shape, x.stride()
    except (RuntimeError, NotImplementedError):
        return None


def _same(inputs: list[Any], earlier: list[Any]) -> bool:
    known = inputs and None not in inputs
    return bool(known and inputs == earlier and not any(identity[0].expired() for identity in earlier))
