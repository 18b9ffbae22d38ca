"""The text form of methods: `DropHead(p=0.2) + NeuTRENO(strength=0.6)`."""

from __future__ import annotations

import ast
import reprlib
from typing import Any

# The registry is filled here: Python runs the package's __init__, which imports every method, before this file.
from headwise.attend.core import Method
from headwise.attend.core.method import REGISTRY, Methods
from headwise.attend.core.settings import no_setting
from headwise.files.entry_points import entry_points, load
from headwise.files.errors import suggest


def parse(text: str) -> Methods:
    """Return the methods of a text, the inverse of `repr`; `+` composes in order of action.

    Args:
        text: such as `"DropHead(p=0.2) + NeuTRENO(strength=0.6)"`; a bare name means the defaults.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if the text is not a sum of calls, a name or setting is unknown, or a setting is out of range.

    Example:
        >>> import headwise
        >>> headwise.parse("DropHead(p=0.1) + NeuTRENO")
        DropHead(p=0.1) + NeuTRENO(strength=0.6)
        >>> headwise.parse("DropHed(p=0.1)")
        Traceback (most recent call last):
        ValueError: There is no method 'DropHed'. Did you mean 'DropHead'? `headwise methods` lists them.
    """
    if not isinstance(text, str):
        raise TypeError(f"parse() takes a text such as 'DropHead(p=0.2)', got {text!r}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"cannot read methods from {text!r}: {error.msg}; write for example 'DropHead(p=0.2)'"
        ) from None
    except (RecursionError, MemoryError, ValueError):
        # nested or added thousands of times, or with null bytes
        raise ValueError(f"cannot read methods from {reprlib.repr(text)}: write 'DropHead(p=0.2)'") from None
    return Methods(_method(node, text) for node in _terms(tree))


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left) + _terms(node.right)
    return [node]


def _method(node: ast.expr, text: str) -> Method:
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name):
        raise ValueError(
            f"cannot read a method from {ast.unparse(node)!r} in {text!r}; write for example 'DropHead(p=0.2)'"
        )
    cls = find(name.id)
    if call is not None and call.args:
        raise ValueError(f"{name.id} takes its settings by name, such as {cls()!r}; got {ast.unparse(node)!r}")
    names = [keyword.arg or "**" for keyword in (call.keywords if call else [])]
    # ast.parse accepts repeated keywords; only Python's compiler, which is not used here, rejects them.
    for key in names:
        if names.count(key) > 1:
            raise ValueError(f"{name.id} is given {key} twice in {text!r}")
    settings = {keyword.arg or "**": _value(keyword.value, name.id) for keyword in (call.keywords if call else [])}
    known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    for key in settings:
        if key not in known:
            raise ValueError(no_setting(name.id, key, known))
    try:
        return cls(**settings)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr, name: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(f"{name}: {ast.unparse(node)!r} is not a number, text, True, False or None") from None


def find(name: str) -> type[Method]:
    """Return the method class of this name, from headwise, an installed package or this process.

    Raises:
        ValueError: if there is none; the message suggests the nearest name.
    """
    if name not in REGISTRY and name in entry_points("headwise.methods"):
        # Importing the class registers it.
        load("headwise.methods", name)
    if name not in REGISTRY:
        raise ValueError(
            f"There is no method {name!r}.{suggest(name, sorted({*REGISTRY, *entry_points('headwise.methods')}))} "
            "`headwise methods` lists them."
        )
    return REGISTRY[name]
