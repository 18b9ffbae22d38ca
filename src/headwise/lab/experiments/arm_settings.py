"""Settings in the text of an arm: plain (`learning_rate=0.1, norm=none`), or schedules (`0 -> 0.6 over 20%`).

Moments of a schedule are steps, or shares of a training whose length only the run knows.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from headwise.attend import schedule as schedules
from headwise.files.errors import suggest
from headwise.lab.experiments.subject import Subject
from headwise_verdict import StudyError

OPEN, CLOSE = "([{", ")]}"


def cut(text: str, marks: str) -> list[tuple[str, str]]:
    """Return the pieces of `text` with the mark before each ("" before the first); `marks` are single characters.

    Raises:
        StudyError: if a bracket or a quote is not closed.
    """
    pieces, begin, mark, depth, quote, escaped = [], 0, "", 0, "", False
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and not escaped else quote
            escaped = letter == "\\" and not escaped
        elif letter in "'\"":
            quote = letter
        elif letter in OPEN + CLOSE:
            depth += 1 if letter in OPEN else -1
            if depth < 0:
                raise StudyError(f"{text!r} closes a bracket that was not opened: {letter!r} at character {place + 1}.")
        elif letter in marks and not depth:
            pieces.append((mark, text[begin:place].strip()))
            begin, mark = place + 1, letter
    if quote or depth:
        raise StudyError(f"{text!r} does not close {'a quote' if quote else 'a bracket'}.")
    return [*pieces, (mark, text[begin:].strip())]


def split(text: str, mark: str) -> list[str]:
    """Return the pieces between marks, without the marks."""
    return [piece for _, piece in cut(text, mark)]


WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}
# settings of a task are identifiers; a script's arguments may have dots and dashes, Hydra's also slashes and leading
# pluses
NAME = re.compile(r"\+{0,2}[A-Za-z_][\w./-]*")
BARE = re.compile(r"[A-Za-z_][\w./:-]*$")


def read_settings(text: str, task: Subject) -> dict[str, Any]:
    """Return the values in `name=value, …`, as the task's fields hold them.

    Raises:
        StudyError: naming the setting that is unknown, given twice, or has an invalid value.
    """
    settings: dict[str, Any] = {}
    for part in split(text, ","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not NAME.fullmatch(name) or not value:
            raise StudyError(f"cannot read a setting from {part!r}; write name=value, for example learning_rate=0.001.")
        if name in settings:
            raise StudyError(f"{name} is given twice in {text!r}.")
        settings[name] = read_setting(name, value, task)
    return settings


def read_setting(name: str, text: str, task: Subject) -> Any:
    """Return the value in a text: a number, true, false, none, (a, b), or a string, whichever the field takes."""
    if not task.has_setting(name):
        known = list(type(task).model_fields)
        raise StudyError(
            f"{type(task).__name__} has no setting {name!r}.{suggest(name, known)} Its settings: {', '.join(known)}."
        )
    settings = task.model_dump()
    first: list[Any] = []
    for candidate in _candidates(text):
        value, wrong = _validated(type(task), settings, name, candidate)
        if not wrong:
            return value
        first = first or wrong
    choices = [str(arg) for arg in get_args(type(task).model_fields[name].annotation) if isinstance(arg, str)]
    raise StudyError(f"{name}={text}: {first[0]['msg']}.{suggest(text, choices)}")


def write_setting(name: str, value: Any, task: Subject) -> str:
    """Return `name=value` in its canonical form: a string is unquoted if it is read back as the same string."""
    value = _plain(value)
    if isinstance(value, str) and BARE.match(value):
        try:
            if _plain(read_setting(name, value, task)) == value:
                return f"{name}={value}"
        except StudyError:
            pass
    return f"{name}={_written(value)}"


def _candidates(text: str) -> list[Any]:
    if text.lower() in WORDS:
        return [WORDS[text.lower()], text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError):
        return [*_tuples(text), text]
    return [value] if isinstance(value, str) else [value, text]


def _tuples(text: str) -> list[Any]:
    """Return the possible values of a tuple with unquoted entries: parsed ones first, then strings."""
    inside = re.fullmatch(r"[(\[](.*)[)\]]", text, re.DOTALL)
    parts = split(inside[1].strip().removesuffix(","), ",") if inside else []
    if not all(parts):
        return []
    try:
        values = [_part(part) for part in parts]
    except (ValueError, SyntaxError, MemoryError):
        return []
    candidates = [tuple(values)] if parts else []
    return [*candidates, tuple(parts)] if parts and all(map(BARE.match, parts)) else candidates


def _part(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    return text if BARE.match(text) else ast.literal_eval(text)


def _validated(kind: type[Subject], settings: dict[str, Any], name: str, value: Any) -> tuple[Any, list[Any]]:
    """Return the value as the field holds it, and the validation errors of this field alone."""
    try:
        held = kind(**settings | {name: value}).setting(name)
    except ValidationError as error:
        wrong = [entry for entry in error.errors() if entry["loc"][:1] == (name,)]
        # settings that are valid only in combination are validated together, later
        return value, wrong
    if isinstance(value, bool) and not isinstance(held, bool):
        # a number field would accept true as 1
        return value, [{"msg": f"Input should be a value of this setting, not {str(value).lower()}"}]
    return held, []


def _plain(value: Any) -> Any:
    """Return a field's value as strings, numbers, tuples and dicts, which the field accepts back."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {_plain(name): _plain(part) for name, part in value.items()}
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(_plain, value), key=repr))
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        # a tuple is read as a Python literal, in which none is not valid
        inside = ", ".join("None" if part is None else _written(part) for part in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
ARROW = re.compile(rf"({NUMBER})\s*->\s*({NUMBER})(?:\s+at\s+(\S+))?(?:\s+over\s+(\S+))?$")
CALL = re.compile(r"(VShape|Ramp|ByDepth)\s*\((.*)\)$", re.DOTALL)
# marks that only the text of a schedule contains, even a misspelt one
LIKE = re.compile(r">|%|\bat\b|\bover\b|^\s*\w+\s*\(")
# numbers and moments that each call takes
CALLS = {
    "VShape": (("start", "end"), ("warmup", "total")),
    "Ramp": (("start", "end"), ("steps", "begin")),
    "ByDepth": (("first", "last"), ()),
}
EXAMPLES = (
    "'1.0 -> 0.1 at 50%', '0 -> 0.6 over 20%', '0 -> 0.6 at 66% over 5%', "
    "'VShape(start=0.2, end=0.2, warmup=10%, total=100%)', 'ByDepth(first=0.1, last=0)'"
)


@dataclass(frozen=True)
class Moment:
    """A number of optimizer steps, or a share of the training (0.5: half of it)."""

    value: float
    is_share: bool

    def steps(self, total: int) -> int:
        """Return the moment in steps of a training of `total` steps."""
        return round(self.value * total) if self.is_share else int(self.value)

    def __str__(self) -> str:
        return f"{100 * self.value:.12g}%" if self.is_share else f"{int(self.value)}"


@dataclass(frozen=True)
class Timed:
    """A schedule of an arm: two values, and the moments of the change between them."""

    kind: str
    first: float
    second: float
    moments: tuple[Moment, ...] = ()

    def schedule(self, total: int) -> schedules.Schedule:
        """Return the schedule in the steps of a training of `total` steps."""
        steps = [moment.steps(total) for moment in self.moments]
        if self.kind == "ByDepth":
            return schedules.ByDepth(self.first, self.second)
        if self.kind == "VShape":
            # keep the shape in a short training, where a share may round to 0 steps
            end = max(2, steps[1])
            return schedules.VShape(self.first, self.second, min(max(1, steps[0]), end - 1), end)
        if self.kind == "switch":
            return schedules.Ramp(self.first, self.second, steps=1, begin=steps[0] - 1)
        return schedules.Ramp(self.first, self.second, steps=max(1, steps[0]), begin=steps[1])

    @property
    def extremes(self) -> tuple[float, ...]:
        """Return the values that include the smallest and the largest of the schedule."""
        return (self.first, self.second, 0.0) if self.kind == "VShape" else (self.first, self.second)

    def __str__(self) -> str:
        if self.kind == "ByDepth":
            return f"ByDepth(first={self.first!r}, last={self.second!r})"
        if self.kind == "VShape":
            return (
                f"VShape(start={self.first!r}, end={self.second!r}, warmup={self.moments[0]}, total={self.moments[1]})"
            )
        arrow = f"{self.first!r} -> {self.second!r}"
        if self.kind == "switch":
            return f"{arrow} at {self.moments[0]}"
        over, begin = self.moments
        return f"{arrow} over {over}" if not begin.value else f"{arrow} at {begin} over {over}"


def is_timed(text: str) -> bool:
    """Return whether a setting's text is a schedule, even a misspelt one, and not a plain value."""
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError):
        return LIKE.search(text) is not None
    return False


def read_timed(text: str) -> Timed:
    """Return the schedule in a text.

    Raises:
        StudyError: if the text is not a schedule, or its moments are not in order.
    """
    if match := CALL.match(text.strip()):
        return _call(match[1], match[2], text)
    if (called := re.match(r"(\w+)\s*\(", text.strip())) and suggest(called[1], list(CALLS)):
        raise StudyError(
            f"there is no schedule {called[1]!r}.{suggest(called[1], list(CALLS))} Write one of {EXAMPLES}."
        )
    match = ARROW.match(text.strip())
    if not match or not (match[3] or match[4]):
        raise StudyError(f"cannot read a schedule from {text!r}; write one of {EXAMPLES}.")
    first, second = float(match[1]), float(match[2])
    if not match[4]:
        return Timed("switch", first, second, (_moment(match[3], text),))
    begin = _moment(match[3], text) if match[3] else Moment(0, is_share=False)
    return Timed("Ramp", first, second, (_length(match[4], text), begin))


def _call(kind: str, inside: str, text: str) -> Timed:
    numbers, moments = CALLS[kind]
    arguments: dict[str, str] = {}
    for part in split(inside, ","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in numbers + moments or name in arguments:
            raise StudyError(f"{kind} takes {', '.join(f'{n}=' for n in numbers + moments)} once each; got {part!r}.")
        arguments[name] = value
    missing = [name for name in numbers + moments if name not in arguments and name != "begin"]
    if missing:
        raise StudyError(f"{kind} needs {', '.join(missing)} in {text!r}.")
    first, second = (_number(arguments[name], text) for name in numbers)
    if kind == "ByDepth":
        return Timed(kind, first, second)
    if kind == "Ramp":
        begin = _moment(arguments["begin"], text) if "begin" in arguments else Moment(0, is_share=False)
        return Timed(kind, first, second, (_length(arguments["steps"], text), begin))
    warmup, total = _length(arguments["warmup"], text), _length(arguments["total"], text)
    if warmup.is_share == total.is_share and warmup.value >= total.value:
        raise StudyError(f"VShape's warmup must end before total, got {warmup} and {total}.")
    return Timed(kind, first, second, (warmup, total))


def _moment(text: str, whole: str) -> Moment:
    is_share = text.endswith("%")
    value = _number(text.removesuffix("%"), whole)
    if is_share and 0 <= value <= 100:
        return Moment(value / 100, is_share=True)
    if not is_share and value >= 0 and value == int(value):
        return Moment(value, is_share=False)
    raise StudyError(
        f"{text!r} in {whole!r} is not a moment; write a share of the training (50%) or a number of steps (300)."
    )


def _length(text: str, whole: str) -> Moment:
    moment = _moment(text, whole)
    if not moment.value:
        raise StudyError(f"{text!r} in {whole!r} lasts no step; write more than 0, or 'at' for a switch.")
    return moment


def _number(text: str, whole: str) -> float:
    if not re.fullmatch(NUMBER, text):
        raise StudyError(f"{text!r} in {whole!r} is not a number.")
    return float(text)
