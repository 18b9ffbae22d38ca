"""The search space of an entry: the learning rate as a factor of the world's own, and the entry's own strengths."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from headwise.lab.comparing.tune import Choice, rate_of, rounded
from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.configuration import BASELINE
from headwise.lab.experiments.task import Task
from headwise_papers.league.files import RATE, Axis, Choices, Entry
from headwise_verdict.files.errors import StudyError

if TYPE_CHECKING:
    from optuna.trial import Trial


class Declared:
    """The search space that an entry's file declares; its first point is the entry as written."""

    def __init__(self, entry: Entry, task: Task) -> None:
        self._entry, self._task = entry, task
        self._arm = read_arm(entry.arm, task)
        self._rate_name, self._rate = rate_of(task)
        if self._rate_name in dict(self._arm.changes):
            raise StudyError(
                f"entry {entry.name}: its arm fixes {self._rate_name}, which is searched. Leave it out of the arm."
            )
        # the name identifies the search, and other ranges make another search
        self.name = " " + json.dumps({name: _values_of(axis) for name, axis in sorted(entry.search.items())})
        self._places = {name: self._place(name) for name in entry.search if name != RATE}
        for name, value in self.first().items():
            _check_within(entry, name, value)
        for point in self._end_points():
            self._check_point(point)

    def first(self) -> dict[str, Any]:
        """Return the point of the entry as written, at the world's learning rate."""
        return {RATE: 1.0} | {name: self._value_as_written(place) for name, place in self._places.items()}

    def ask(self, trial: Trial) -> dict[str, Any]:
        """Return the point that a trial suggests; a range of floats above 0 is searched on a logarithmic scale."""
        return {name: _suggest(trial, name, axis) for name, axis in self._entry.search.items()}

    def choice(self, point: dict[str, Any]) -> Choice:
        """Return the arm and the learning rate at a point, with numbers rounded to three digits."""
        methods, changes = list(self._arm.methods), {}
        for name, (index, field) in self._places.items():
            value = rounded(point[name]) if isinstance(point[name], float) else point[name]
            if index is None:
                changes[field] = value
            else:
                methods[index] = methods[index].replace(**{field: value})
        arm = dataclasses.replace(self._arm, methods=tuple(methods))
        arm = arm.changed(self._task, **changes) if changes else arm
        return Choice(arm.text, rounded(self._rate * point[RATE]))

    def _place(self, name: str) -> tuple[int | None, str]:
        """Return the index of the method with this field, and the field; index None for a changed task setting."""
        kind, _, field = name.rpartition(".")
        for index, method in enumerate(self._arm.methods):
            fields = {one.name for one in dataclasses.fields(method)}  # type: ignore[arg-type]
            if field in fields and kind in ("", type(method).__name__):
                return index, field
        if name in dict(self._arm.changes):
            return None, name
        raise StudyError(
            f"entry {self._entry.name}: it searches {name}, which is neither a field of {self._entry.arm} nor a "
            "setting that this arm changes. Correct the name, or write the setting into the arm: "
            f"'baseline | {name}=...'."
        )

    def _value_as_written(self, place: tuple[int | None, str]) -> Any:
        index, field = place
        return dict(self._arm.changes)[field] if index is None else getattr(self._arm.methods[index], field)

    def _end_points(self) -> list[dict[str, Any]]:
        """Return the points with one strength at an end of its range, to refuse invalid values before any run."""
        ends: list[dict[str, Any]] = []
        for name, axis in self._entry.search.items():
            ends += [self.first() | {name: value} for value in (axis.choices if isinstance(axis, Choices) else axis)]
        return ends

    def _check_point(self, point: dict[str, Any]) -> None:
        try:
            arm = read_arm(self.choice(point).label, self._task)
            arm.task(self._task)
        except (ValueError, TypeError, StudyError) as error:
            raise StudyError(f"entry {self._entry.name}: at {point} it is invalid: {error}") from error
        if self._entry.kind != "plain" and arm.does_the_same(read_arm(BASELINE, self._task), self._task):
            raise StudyError(
                f"entry {self._entry.name}: at {point} it equals the plain model. Remove this value from its range."
            )


def _suggest(trial: Trial, name: str, axis: Axis) -> Any:
    if isinstance(axis, Choices):
        return trial.suggest_categorical(name, list(axis.choices))
    low, high = axis
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high)
    return trial.suggest_float(name, low, high, log=low > 0)


def _check_within(entry: Entry, name: str, value: Any) -> None:
    axis = entry.search[name]
    inside = value in axis.choices if isinstance(axis, Choices) else axis[0] <= value <= axis[1]
    if not inside:
        raise StudyError(
            f"entry {entry.name}: as written, {name} is {value}, outside of the searched range ({_values_of(axis)}). "
            "Extend the range."
        )


def _values_of(axis: Axis) -> list[Any]:
    return list(axis.choices if isinstance(axis, Choices) else axis)
