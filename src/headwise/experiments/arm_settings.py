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
        StudyError: where a bracket or a quote is not closed.
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
    """Return the pieces between marks, without them."""
    return [piece for _, piece in cut(text, mark)]


WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}
# a task's are identifiers, a script's arguments may have dots and dashes, Hydra's slashes and the pluses of new ones
NAME = re.compile(r"\+{0,2}[A-Za-z_][\w./-]*")
BARE = re.compile(r"[A-Za-z_][\w./:-]*$")


def read_settings(text: str, task: Subject) -> dict[str, Any]:
    """Read `name=value, …` into the values that the task's fields hold.

    Raises:
        StudyError: naming the setting that is unknown, given twice, or has a value it cannot have.
    """
    found: dict[str, Any] = {}
    for part in split(text, ","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not NAME.fullmatch(name) or not value:
            raise StudyError(f"cannot read a setting from {part!r}; write name=value, for example learning_rate=0.001.")
        if name in found:
            raise StudyError(f"{name} is given twice in {text!r}.")
        found[name] = read_setting(name, value, task)
    return found


def read_setting(name: str, text: str, task: Subject) -> Any:
    """Read one value: a number, true, false, none, (a, b), or a text, whichever the field takes."""
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
    choices = [str(one) for one in get_args(type(task).model_fields[name].annotation) if isinstance(one, str)]
    raise StudyError(f"{name}={text}: {first[0]['msg']}.{suggest(text, choices)}")


def write_setting(name: str, value: Any, task: Subject) -> str:
    """Write `name=value` in its one form: a text stands bare wherever it is read back as the same text."""
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
    """Return what a tuple may mean whose texts, true, none or inf stand bare, as each may alone: values first, then
    texts alone."""
    inside = re.fullmatch(r"[(\[](.*)[)\]]", text, re.DOTALL)
    parts = split(inside[1].strip().removesuffix(","), ",") if inside else []
    if not all(parts):
        return []
    try:
        values = [_part(part) for part in parts]
    except (ValueError, SyntaxError, MemoryError):
        return []
    found = [tuple(values)] if parts else []
    return [*found, tuple(parts)] if parts and all(map(BARE.match, parts)) else found


def _part(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    return text if BARE.match(text) else ast.literal_eval(text)


def _validated(kind: type[Subject], settings: dict[str, Any], name: str, value: Any) -> tuple[Any, list[Any]]:
    """Return the value as the field holds it, and what is wrong with it as a value of this field alone."""
    try:
        found = kind(**settings | {name: value}).setting(name)
    except ValidationError as error:
        wrong = [found for found in error.errors() if found["loc"][:1] == (name,)]
        # settings that fit only with others of the same text are judged together, later
        return value, wrong
    if isinstance(value, bool) and not isinstance(found, bool):
        # a number would take true for 1
        return value, [{"msg": f"Input should be a value of this setting, not {str(value).lower()}"}]
    return found, []


def _plain(value: Any) -> Any:
    """Return what a field holds as texts, numbers, tuples and dicts, from which the field takes it back."""
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
        # none is no literal of Python, as which a tuple is read
        inside = ", ".join("None" if part is None else _written(part) for part in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)
