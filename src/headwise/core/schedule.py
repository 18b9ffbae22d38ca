"""Schedules: strengths that change while training, without recompiling."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.core.site import Site


@dataclass(frozen=True)
class VShape:
    """Falls from `start` to 0 over `warmup` steps, then rises to `end` at step `total`.

    The schedule of DropHead: Zhou et al. 2020, arXiv 2004.13342.
    """

    start: float
    end: float
    warmup: int
    total: int

    def __post_init__(self) -> None:
        if not 0 < self.warmup < self.total:
            raise ValueError(f"VShape needs 0 < warmup < total, got warmup={self.warmup}, total={self.total}")

    def value(self, step: int, site: Site) -> float:
        """Give the strength at `step` (optimizer steps taken)."""
        if step < self.warmup:
            return self.start * (1 - step / self.warmup)
        return self.end * min(1.0, (step - self.warmup) / (self.total - self.warmup))


@dataclass(frozen=True)
class ByDepth:
    """Goes linearly from `first` at the first layer of a stack to `last` at its last.

    The decreasing ratio of DropKey: Li et al. 2023, arXiv 2208.02646.
    """

    first: float
    last: float

    def value(self, step: int, site: Site) -> float:
        """Give the strength at the depth of `site`."""
        return self.first + (self.last - self.first) * site.relative_depth


@dataclass(frozen=True)
class Ramp:
    """Stays at `start` for `begin` optimizer steps, goes linearly to `end` over `steps` further ones, then stays."""

    start: float
    end: float
    steps: int
    begin: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"Ramp needs steps >= 1, got {self.steps}")

    def value(self, step: int, site: Site) -> float:
        """Give the strength at `step` (optimizer steps taken)."""
        return self.start + (self.end - self.start) * min(1.0, max(0.0, (step - self.begin) / self.steps))


Schedule = VShape | ByDepth | Ramp


def extremes(value: float | Schedule) -> tuple[float, ...]:
    """Give the least and the greatest strength that a number or a schedule comes to."""
    if isinstance(value, ByDepth):
        return value.first, value.last
    return (value.start, value.end) if isinstance(value, VShape | Ramp) else (value,)
