"""Changes of settings in the text of an arm: `learning_rate=0.1, norm=none`."""

from __future__ import annotations

import ast
import json
import re
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from headwise.core.settings import suggest
from headwise.experiments.subject import Subject
from headwise.files.errors import StudyError

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
