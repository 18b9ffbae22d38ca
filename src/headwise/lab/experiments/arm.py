"""Arm: methods, their layers and schedules, and changes of recipe and task; its text is its label, key and argument."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from headwise.files.errors import suggest
from headwise.lab.experiments.arm_settings import Timed, cut, is_timed, read_settings, read_timed, split, write_setting
from headwise.lab.experiments.configuration import BASELINE, SAME
from headwise.lab.experiments.subject import Subject
from headwise.lab.experiments.task_source import build_task
from headwise_verdict import StudyError

if TYPE_CHECKING:
    from headwise.attend import Method, Site


DEPTHS = re.compile(r"\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*$")
# every depth of a range is stored: a typing error must not fill the memory
DEEPEST = 100_000
PATTERN = re.compile(r"[\w.*?\[\]!-]+$")


@dataclass(frozen=True)
class Where:
    """The attention layers that an arm changes: by depth, counted from 0 in each stack, or by name."""

    depths: tuple[int, ...] = ()
    pattern: str = ""

    def __call__(self, site: Site) -> bool:
        """Return whether a layer is selected by its depth, or by a pattern on its name or whole parts of it."""
        if self.depths:
            return site.depth in self.depths
        return fnmatchcase(site.name, self.pattern) or f".{self.pattern}." in f".{site.name}."

    def check(self, sites: list[Site]) -> None:
        """Check that every depth exists and that the pattern matches a layer.

        Raises:
            StudyError: with the existing layers.
        """
        missing = [depth for depth in self.depths if all(site.depth != depth for site in sites)]
        if missing:
            most = max((site.depth for site in sites), default=-1)
            raise StudyError(
                f"'@ {self}' asks for depth {missing[0]}; attention layers have depths 0 to {most}, counted from 0."
                if most >= 0
                else f"'@ {self}': the model has no attention layer."
            )
        if self.pattern and not any(map(self, sites)):
            known = sorted({part for site in sites for part in (site.name, *site.name.split("."))})
            names = ", ".join(site.name for site in sites)
            raise StudyError(
                f"'@ {self}' names no attention layer.{suggest(self.pattern, known)} Layers: {names or 'none'}."
            )

    def __str__(self) -> str:
        return self.pattern or ",".join(_ranges(self.depths))


def read_where(text: str) -> Where:
    """Return the layers written as depths or a pattern.

    Raises:
        StudyError: if the text is neither, or a range runs backwards.
    """
    if DEPTHS.match(text):
        depths: set[int] = set()
        for part in text.split(","):
            first, _, last = (piece.strip() for piece in part.partition("-"))
            if last and int(last) < int(first):
                raise StudyError(f"'@ {text}' runs backwards: write {last}-{first}.")
            if int(last or first) >= DEEPEST:
                raise StudyError(f"'@ {text}' asks for depth {last or first}, which no model has.")
            depths |= set(range(int(first), int(last or first) + 1))
        return Where(depths=tuple(sorted(depths)))
    if PATTERN.match(text):
        return Where(pattern=text)
    raise StudyError(
        f"cannot read layers from '@ {text}'; write depths (2-5, or 0,3), or a pattern on names (encoder)."
    )


def _ranges(depths: tuple[int, ...]) -> list[str]:
    ranges: list[list[int]] = []
    for depth in depths:
        if ranges and ranges[-1][1] == depth - 1:
            ranges[-1][1] = depth
        else:
            ranges.append([depth, depth])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


# settings that choose examples: arms with different values would not be paired
OF_DATA = ("train_size", "test_size", "held_out")
AnySubject = TypeVar("AnySubject", bound=Subject)
CALL = re.compile(r"(\w+)\s*\((.*)\)$", re.DOTALL)


@dataclass(frozen=True)
class Arm:
    """One arm of a study; `read_arm` makes it from text, and `text` writes it in its canonical form."""

    name: str = ""
    methods: tuple[Method, ...] = ()
    # (index of the method, setting, schedule)
    timed: tuple[tuple[int, str, Timed], ...] = ()
    where: Where | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    # the changes as text, each in its canonical form
    written: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the arm in its canonical form: methods, `@` where, `|` changes in alphabetical order."""
        parts = [self.name or " + ".join(self._methods())]
        parts += [f"@ {self.where}"] if self.where else []
        parts += [f"| {', '.join(self.written)}"] if self.written else []
        return " ".join(parts)

    def _methods(self) -> list[str]:
        return [
            method.written({name: str(timed) for place, name, timed in self.timed if place == index})
            for index, method in enumerate(self.methods)
        ]

    def task(self, task: AnySubject) -> AnySubject:
        """Return the task with the arm's changes of recipe and settings."""
        return build_task(type(task), task.model_dump() | dict(self.changes)).located(task.folder)

    def changed(self, task: Subject, **changes: Any) -> Arm:
        """Return the arm with further changes of `task`, or with new values for its own changes."""
        values = dict(sorted((dict(self.changes) | changes).items()))
        written = tuple(write_setting(name, value, task) for name, value in values.items())
        return dataclasses.replace(self, changes=tuple(values.items()), written=written)

    def does_the_same(self, other: Arm, task: Subject) -> bool:
        """Return whether two arms do the same under different texts, for example if one sets a default explicitly."""
        if (self.name, self.methods, self.timed, self.where) != (other.name, other.methods, other.timed, other.where):
            return False
        return self.task(task) == other.task(task)

    def resolved(self) -> list[dict[str, Any]]:
        """Return every setting of the methods, defaults included: a changed default makes another run."""
        return [{"name": type(method).__name__, "settings": method.settings()} for method in self.methods]


def read_arm(text: str, task: Subject) -> Arm:
    """Return the arm in a text `Method(...) + Method(...) @ where | setting=value, ...`; `@` and `|` may swap places.

    Raises:
        StudyError: with the nearest name, if a method, a setting or a schedule is unknown or out of range.
    """
    (_, head), *rest = cut(text.strip(), "@|")
    marks = [mark for mark, _ in rest]
    for mark, part in (("@", "where"), ("|", "changes")):
        if marks.count(mark) > 1:
            raise StudyError(f"{text!r} says {part} twice; write one '{mark}'.")
    pieces = dict(rest)
    for mark, piece in pieces.items():
        if not piece:
            raise StudyError(f"{text!r} has nothing after '{mark}'.")
    where = read_where(pieces["@"]) if "@" in pieces else None
    changes = _changes(pieces["|"], task) if "|" in pieces else {}
    if head in (BASELINE, SAME):
        _check_plain(head, where, changes)
        return Arm(head).changed(task, **changes)
    methods, timed = _read_methods(head, text)
    return Arm("", methods, timed, where).changed(task, **changes)


def read_arms(texts: Sequence[str], task: Subject) -> dict[str, Arm]:
    """Return arms by their canonical form, without the baseline, which is always part of a study.

    Raises:
        StudyError: if a text is not an arm, or two texts are the same arm.
    """
    arms: dict[str, Arm] = {}
    written: dict[str, str] = {}
    for text in texts:
        try:
            arm = read_arm(text, task)
        except StudyError as error:
            raise StudyError(f"--method {text!r}: {error}") from error
        label = arm.text
        if label == BASELINE:
            continue
        if label in written:
            raise StudyError(f"--method {written[label]!r} and {text!r} are the same arm, {label}. Give one of them.")
        arms[label], written[label] = arm, text
    return arms


def refuse_equal_arms(arms: Sequence[Arm], task: Subject) -> None:
    """Raise StudyError for two arms that do the same, for example because one sets a default explicitly.

    Arms of a predefined study may become equal at one of its scales, and are kept.

    Raises:
        StudyError: naming both arms, or the arm that equals the baseline.
    """
    for number, arm in enumerate(arms):
        if arm.does_the_same(Arm(BASELINE), task):
            raise StudyError(
                f"--method {arm.text!r} is the baseline: {', '.join(arm.written)} holds there too. Change another "
                f"value, or write {SAME!r} for a control."
            )
        for other in arms[:number]:
            if arm.does_the_same(other, task):
                raise StudyError(
                    f"--method {other.text!r} and {arm.text!r} are the same arm, {other.text}. Give one of them."
                )


def _changes(text: str, task: Subject) -> dict[str, Any]:
    changes = read_settings(text, task)
    choosing = [name for name in changes if name in OF_DATA]
    if choosing:
        raise StudyError(
            f"'| {text}' changes {', '.join(choosing)}, which choose the examples: arms are compared on the same data. "
            f"Change it for all arms: --set {choosing[0]}=..."
        )
    changed = build_task(type(task), task.model_dump() | changes)
    # as the fields store them: the rate 1 becomes 1.0
    return {name: changed.setting(name) for name in changes}


def _check_plain(name: str, where: Where | None, changes: dict[str, Any]) -> None:
    if where is not None:
        raise StudyError(f"{name} has no methods, so that '@ {where}' has no meaning.")
    if name == SAME and changes:
        raise StudyError(f"{SAME} is the baseline again and changes nothing. Write '{BASELINE} | ...' for changes.")


def _read_methods(text: str, whole: str) -> tuple[tuple[Method, ...], tuple[tuple[int, str, Timed], ...]]:
    methods: list[Method] = []
    timed: list[tuple[int, str, Timed]] = []
    for term in split(text, "+"):
        method, schedules = _read_method(term, whole)
        if method in methods:
            raise StudyError(f"{method!r} is given twice in {whole!r}.")
        timed += [(len(methods), name, schedule) for name, schedule in schedules.items()]
        methods.append(method)
    return tuple(methods), tuple(timed)


def _read_method(term: str, whole: str) -> tuple[Method, dict[str, Timed]]:
    if not term:
        raise StudyError(f"{whole!r} lacks a method; write for example 'DropHead(p=0.2)', or '{BASELINE}'.")
    schedules: dict[str, Timed] = {}
    plain = term
    if match := CALL.match(term):
        parts = []
        for part in split(match[2], ","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if equals and is_timed(value):
                schedules[name] = read_timed(value)
                part = f"{name}={schedules[name].first!r}"
            parts.append(part)
        plain = f"{match[1]}({', '.join(parts)})"
    method = _parse(plain, whole)
    for name, schedule in schedules.items():
        _check_timed(method, name, schedule)
    return method, schedules


def _parse(text: str, whole: str) -> Method:
    from headwise.attend import parse

    try:
        methods = parse(text)
    except ValueError as error:
        near = difflib.get_close_matches(text.lower(), (BASELINE, SAME), n=1)
        raise StudyError(f"{error} Or did you mean {near[0]!r}?" if near else str(error)) from error
    if len(methods) != 1:
        raise StudyError(f"cannot read one method from {text!r} in {whole!r}.")
    return methods[0]


def _check_timed(method: Method, name: str, schedule: Timed) -> None:
    if name not in method.live:
        changeable = ", ".join(method.live) or "nothing"
        raise StudyError(f"{type(method).__name__}.{name} cannot change while training; what can: {changeable}.")
    try:
        for number in schedule.extremes:
            method.replace(**{name: number})
    except ValueError as error:
        raise StudyError(f"{name}={schedule}: {error}") from error
