"""Strengths: the settings that change while training, written into 0-d tensors so that compiled graphs stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .method import Method
from .schedule import Schedule, extremes

if TYPE_CHECKING:
    from .fitted import Fitted


class Strengths:
    """Keeps what `set()` chose over the methods' own settings and schedules."""

    def __init__(self) -> None:
        self.chosen: dict[tuple[Method, str], float | Schedule] = {}

    def copy(self) -> Strengths:
        """Give a copy; the methods are the same."""
        twin = Strengths()
        twin.chosen.update(self.chosen)
        return twin

    def set(self, methods: Sequence[Method], method: type[Method] | Method, changes: dict[str, float | Schedule]) -> None:
        """Choose new strengths for all fitted methods of that class, or for that one.

        Raises:
            ValueError: where the method is not fitted, a field cannot change while training, or a value is out of range.
            TypeError: where a value is neither a number nor a schedule.
        """
        hit = [m for m in methods if m is method or m == method or type(m) is method]
        if not hit:
            name = method.__name__ if isinstance(method, type) else repr(method)
            raise ValueError(f"{name} is not fitted on this model; fitted: {' + '.join(map(repr, methods))}")
        if not changes:
            raise ValueError(f"set() needs to know which setting of {hit[0]!r} changes; what can: {', '.join(hit[0].live) or 'nothing'}")
        for known in hit:
            for name, value in changes.items():
                _check(known, name, value)
        self.chosen.update({(known, name): value for known in hit for name, value in changes.items()})

    def write(self, fitted: Iterable[Fitted], step: int) -> None:
        """Write the strengths of this step into the tensors that the methods read."""
        for f in fitted:
            for method, values in zip(f.methods, f.values, strict=True):
                for name, tensor in values.items():
                    chosen = self.chosen.get((method, name))
                    if chosen is None:
                        number = method.at(name, step, f.site)
                    else:
                        number = chosen if isinstance(chosen, int | float) else chosen.value(step, f.site)
                    tensor.fill_(number)


def _check(method: Method, name: str, value: float | Schedule) -> None:
    if name not in method.live:
        raise ValueError(f"{type(method).__name__}.{name} cannot change while training; what can: {', '.join(method.live) or 'nothing'}")
    if isinstance(value, bool) or not isinstance(value, int | float | Schedule):
        raise TypeError(f"{type(method).__name__}.{name} must be a number or a schedule, got {value!r}")
    for number in extremes(value):
        method.replace(**{name: number})
