"""Strengths that change while training, in 0-d tensors, and the state that a resumed run needs."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method, Schedule, Site, schedule
from headwise.attend.core.schedule import extremes, number
from headwise.files.user_warnings import warn

CAPTURED = (
    "{name} of {method!r} is {strength:g} now, and a training step was captured as a CUDA graph before: its replays "
    "keep the strengths that it had then. Capture it again after a change"
)


class Strengths:
    """The strengths chosen by `set()`, which override the methods' own settings and schedules."""

    def __init__(self) -> None:
        self.chosen: dict[tuple[Method, str], float | Schedule] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Strengths:
        # Methods are compared by identity, so the copy shares them.
        twin = Strengths()
        twin.chosen.update(self.chosen)
        return twin

    def set(
        self, methods: Sequence[Method], method: type[Method] | Method, changes: dict[str, float | Schedule]
    ) -> None:
        """Choose new strengths for all fitted methods of that class, or for that method.

        Raises:
            ValueError: if the method is not fitted, a field cannot change while training, or a value is out of
                range.
            TypeError: if a value is neither a number nor a schedule.
        """
        matches = [m for m in methods if m is method or m == method or type(m) is method]
        if not matches:
            name = method.__name__ if isinstance(method, type) else repr(method)
            raise ValueError(f"{name} is not fitted on this model; fitted: {' + '.join(map(repr, methods))}")
        if not changes:
            raise ValueError(
                f"set() needs a new value for a setting of {matches[0]!r}; these can change: "
                f"{', '.join(matches[0].live) or 'none'}"
            )
        changes = {name: number(value) for name, value in changes.items()}
        for match in matches:
            for name, value in changes.items():
                _check(match, name, value)
        self.chosen.update({(match, name): value for match in matches for name, value in changes.items()})

    def write(self, fitted: Iterable[FittedLayer], step: int) -> None:
        """Write the strengths of this step into the tensors that the methods read."""
        for f in fitted:
            for method, state in zip(f.methods, f.states, strict=True):
                for name, tensor in state.strengths.items():
                    strength = self.at(method, name, step, f.site)
                    if strength == state.written.get(name):
                        continue
                    state.written[name] = strength
                    tensor.fill_(strength)
                    if f.shared.captured:
                        f.shared.captured = False
                        warn(CAPTURED.format(method=method, name=name, strength=strength))

    def at(self, method: Method, name: str, step: int, site: Site) -> float:
        """Return the strength of a method on a site at an optimizer step."""
        chosen = self.chosen.get((method, name))
        if isinstance(chosen, Schedule):
            return chosen.value(step, site)
        # A chosen number becomes the base of the method's own schedule over depth or steps.
        return (method if chosen is None else method.replace(**{name: chosen})).at(name, step, site)

    def shown(self, method: Method) -> str:
        """Return a method's text with the strengths that were chosen by `set()`."""
        chosen = {name: value for (m, name), value in self.chosen.items() if m is method}
        now = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        return f"{method!r} (now {now})" if now else repr(method)

    def state(self, methods: Sequence[Method]) -> list[dict[str, Any]]:
        """Return the chosen strengths as numbers and text: the method's index, the setting, its value or schedule."""
        entries = []
        for (method, name), value in self.chosen.items():
            place = next(i for i, m in enumerate(methods) if m is method)
            entry: dict[str, Any] = {"method": place, "kind": type(method).__name__, "setting": name}
            if isinstance(value, Schedule):
                settings = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
                entry |= {"schedule": type(value).__name__, "fields": settings}
            else:
                entry["value"] = value
            entries.append(entry)
        return entries

    def load_state(self, methods: Sequence[Method], state: Sequence[dict[str, Any]]) -> None:
        """Load the `state()` of an earlier run with the same methods, which `check_state` verifies."""
        self.chosen.clear()
        for entry in state:
            self.chosen[methods[entry["method"]], entry["setting"]] = _value(entry)

    def check_state(self, methods: Sequence[Method], state: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if a state has other methods, or a schedule that is not one of headwise's."""
        for entry in state:
            place, name = entry["method"], entry["setting"]
            method = methods[place] if place < len(methods) else None
            kind = entry["kind"]
            if method is None or type(method).__name__ != kind or name not in method.live:
                raise ValueError(
                    f"this state changed {name!r} of method {place + 1}, {kind}, and the methods here are "
                    f"{' + '.join(map(repr, methods)) or 'none'}: regularize with the methods that state() was called "
                    "with"
                )
            kept = getattr(schedule, entry["schedule"], None) if "schedule" in entry else None
            if "schedule" in entry and not (isinstance(kept, type) and issubclass(kept, Schedule)):
                raise ValueError(
                    f"the schedule {entry['schedule']} is not one of headwise's: set() it again before load_state()"
                )
            try:
                _check(method, name, _value(entry))
            except TypeError as error:
                raise ValueError(f"this state has a wrong value of {kind}.{name}: {error}") from None


def _value(entry: dict[str, Any]) -> float | Schedule:
    """Return the number or schedule of an entry of a state."""
    value: float | Schedule = (
        getattr(schedule, entry["schedule"])(**entry["fields"]) if "schedule" in entry else entry["value"]
    )
    return value


def _check(method: Method, name: str, value: float | Schedule) -> None:
    if name not in method.live:
        raise ValueError(
            f"{type(method).__name__}.{name} cannot change while training; these can: "
            f"{', '.join(method.live) or 'none'}"
        )
    if isinstance(value, bool) or not isinstance(value, int | float | Schedule):
        raise TypeError(f"{type(method).__name__}.{name} must be a number or a schedule, got {value!r}")
    for strength in extremes(value):
        # Methods read strengths in fp32, in which 1e-60 is 0 and 1e60 is infinite.
        for read in (strength, float(torch.tensor(strength, dtype=torch.float32))):
            _check_number(method, name, read, value)


def _check_number(method: Method, name: str, strength: float, value: float | Schedule) -> None:
    try:
        method.replace(**{name: strength})
    except ValueError as error:
        raise (ValueError(f"{error}, which {value!r} comes to") if isinstance(value, Schedule) else error) from None
    if not math.isfinite(strength):
        raise ValueError(f"{type(method).__name__}.{name} must be finite in fp32, got {value!r}")


def progress(step: int, fitted: list[FittedLayer], strengths: Strengths, methods: Sequence[Method]) -> dict[str, Any]:
    """Return the optimizer's steps, the passes through each site, and the strengths that were set."""
    counters = {f.site.name: f.passes.count() for f in fitted}
    kinds = [type(method).__name__ for method in methods]
    return {"step": step, "counters": counters, "methods": kinds, "strengths": strengths.state(methods)}


def check_progress(
    state: dict[str, Any], fitted: list[FittedLayer], strengths: Strengths, methods: Sequence[Method], draws: str
) -> None:
    """Raise ValueError if a state belongs to another model, to other methods, or to draws of another kind."""
    if not _is_state(state):
        raise ValueError(
            f"load_state() takes the result of state() (step, counters, methods, strengths), got {reprlib.repr(state)}"
        )
    own, other = {f.site.name for f in fitted}, set(state["counters"])
    if own != other:
        groups = (("only here", own - other), ("only there", other - own))
        lines = [f"{group}: {', '.join(sorted(names))}" for group, names in groups if names]
        raise ValueError(
            f"this state comes from a model with other regularized layers ({'; '.join(lines)}): regularize the model "
            "as it was when state() was called, with the same where="
        )
    strengths.check_state(methods, state["strengths"])
    # Strengths may differ: a run may continue with others.
    kinds = [type(method).__name__ for method in methods]
    if (saved := state["methods"]) != kinds:
        raise ValueError(
            f"this state comes from {' + '.join(saved) or 'no method'}, and the methods here are "
            f"{' + '.join(kinds) or 'none'}: regularize with the methods that state() was called with"
        )
    # States of earlier versions do not tell.
    if (kept := state.get("draws", "counter")) != draws:
        raise ValueError(
            f"this state comes from a run with draws={kept!r}, and this one has draws={draws!r}: pass draws={kept!r} "
            "to regularize(), or the resumed run would draw other numbers"
        )


def _is_state(state: Any) -> bool:
    """Return whether a value has the form of `progress`, whatever its methods and layers."""
    if not isinstance(state, dict) or not {"step", "counters", "methods", "strengths"} <= state.keys():
        return False
    counters, kinds, entries = state["counters"], state["methods"], state["strengths"]
    return (
        isinstance(counters, dict)
        and all(map(_is_count, (state["step"], *counters.values())))
        and isinstance(kinds, list | tuple)
        and all(isinstance(kind, str) for kind in kinds)
        and isinstance(entries, list | tuple)
        and all(map(_is_choice, entries))
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_choice(entry: Any) -> bool:
    if not (isinstance(entry, dict) and _is_count(entry.get("method"))):
        return False
    if not all(isinstance(entry.get(key), str) for key in ("kind", "setting")):
        return False
    if "schedule" in entry:
        return isinstance(entry["schedule"], str) and isinstance(entry.get("fields"), dict)
    return isinstance(entry.get("value"), int | float)


def load_progress(
    state: dict[str, Any], fitted: list[FittedLayer], strengths: Strengths, methods: Sequence[Method]
) -> int:
    """Load a state that was checked, and return its step."""
    step = int(state["step"])
    for f in fitted:
        f.passes.recount(int(state["counters"][f.site.name]))
    strengths.load_state(methods, state["strengths"])
    strengths.write(fitted, step)
    return step
