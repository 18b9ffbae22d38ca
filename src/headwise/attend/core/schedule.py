"""Schedules: strengths that change during training without recompiling."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from headwise.attend.core.site import Site
from headwise.files.arguments import is_a

if TYPE_CHECKING:
    # Fields declared as numbers also take schedules, so type checkers must accept `DropHead(p=VShape(...))`.
    Strength = float
else:
    Strength = object


def number(value: Any) -> Any:
    """Return a number of another library, such as numpy's float32, as Python's own, for printing and saving."""
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _normalise(schedule: Any) -> None:
    for field in fields(schedule):
        value = number(getattr(schedule, field.name))
        is_a(field.name, value, (int, float), "a number")
        object.__setattr__(schedule, field.name, value)
    if not all(math.isfinite(getattr(schedule, field.name)) for field in fields(schedule)):
        raise ValueError(f"{type(schedule).__name__} needs finite numbers, got {schedule!r}")


@dataclass(frozen=True)
class VShape(Strength):
    """A schedule that falls from `start` to 0 over `warmup` steps, then rises to `end` at step `total`.

    The schedule of DropHead: Zhou et al. 2020, arXiv 2004.13342.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> handle = headwise.regularize(model, headwise.DropKey(p=0.1))
        >>> handle.set(headwise.DropKey, p=headwise.VShape(start=0.2, end=0.2, warmup=100, total=1000))
    """

    start: float
    end: float
    warmup: int
    total: int

    def __post_init__(self) -> None:
        _normalise(self)
        if not 0 < self.warmup < self.total:
            raise ValueError(f"VShape needs 0 < warmup < total, got warmup={self.warmup}, total={self.total}")

    def value(self, step: int, site: Site) -> float:
        """Return the strength at `step` (optimizer steps taken)."""
        if step < self.warmup:
            return self.start * (1 - step / self.warmup)
        return self.end * min(1.0, (step - self.warmup) / (self.total - self.warmup))


@dataclass(frozen=True)
class ByDepth(Strength):
    """A schedule over depth: linear from `first` at the first layer of a stack to `last` at its last.

    The decreasing ratio of DropKey: Li et al. 2023, arXiv 2208.02646.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> handle = headwise.regularize(model, headwise.DropKey(p=0.1))
        >>> handle.set(headwise.DropKey, p=headwise.ByDepth(first=0.3, last=0.1))
    """

    first: float
    last: float

    def __post_init__(self) -> None:
        _normalise(self)

    def value(self, step: int, site: Site) -> float:
        """Return the strength at the depth of `site`."""
        return self.first + (self.last - self.first) * site.relative_depth


@dataclass(frozen=True)
class Ramp(Strength):
    """A schedule that stays at `start` for `begin` optimizer steps, then changes linearly to `end` over `steps` steps.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> handle = headwise.regularize(model, headwise.DropKey(p=0.1))
        >>> handle.set(headwise.DropKey, p=headwise.Ramp(start=0.0, end=0.2, steps=100))
    """

    start: float
    end: float
    steps: int
    begin: int = 0

    def __post_init__(self) -> None:
        _normalise(self)
        if self.steps < 1:
            raise ValueError(f"Ramp needs steps >= 1, got {self.steps}")

    def value(self, step: int, site: Site) -> float:
        """Return the strength at `step` (optimizer steps taken)."""
        return self.start + (self.end - self.start) * min(1.0, max(0.0, (step - self.begin) / self.steps))


Schedule = VShape | ByDepth | Ramp


def extremes(value: float | Schedule) -> tuple[float, ...]:
    """Return strengths that bound a number or a schedule: all its values are between the smallest and the largest."""
    if isinstance(value, ByDepth):
        return value.first, value.last
    if isinstance(value, VShape):
        # It reaches 0 between its ends.
        return value.start, 0.0, value.end
    return (value.start, value.end) if isinstance(value, Ramp) else (value,)
