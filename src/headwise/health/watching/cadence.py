"""The cadence of a watch: full readings now and then, and closer ones for a while after a cheap signal has moved."""

from __future__ import annotations

from dataclasses import dataclass

# Standard deviations above the fifty steps before at which a loss or a gradient norm has moved.
MOVED = 3.0
# The share of the limit of the largest logit at which it has moved.
NEAR = 0.5


@dataclass(frozen=True)
class Closer:
    """A stretch of closer readings: its first and last step, the number of steps between readings, and the reason."""

    first: int
    last: int
    every: int
    why: str

    def __str__(self) -> str:
        return f"Read every {self.every} steps from step {self.first} to {self.last}, because {self.why}."


class Cadence:
    """The choice of the steps that are read.

    Every `every`-th step is read. After a cheap signal has moved, so is every `closer`-th of the next `every` steps;
    as many steps then pass without a new stretch, so that at most half of the time is read closer.
    """

    def __init__(self, every: int, closer: int | None) -> None:
        self.every, self.closer = every, closer
        self.stretches: list[Closer] = []
        self._last, self._free = -1, 0

    def due(self, step: int) -> bool:
        """Return whether a step is to be read."""
        return step % self.every == 0 or (self.closer is not None and step <= self._last and step % self.closer == 0)

    def moved(self, step: int, why: str) -> None:
        """Read the steps after `step` closer, unless another stretch ended too recently."""
        if self.closer is None or self.closer >= self.every or step < self._free:
            return
        self._last, self._free = step + self.every, step + 2 * self.every
        self.stretches.append(Closer(step + 1, self._last, self.closer, why))

    def begin(self) -> None:
        """Forget the running stretch, as at the start of a resumed run."""
        self._last, self._free = -1, 0
