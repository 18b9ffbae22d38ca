"""A digest of the code that a task's numbers depend on: an edit of a file changes only the tasks that use the line."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterable


def code_digest(task: type) -> str:
    """Return the SHA-256 of the definitions that a task uses, in its own module and in those of its bases.

    These are its class, and every class, function and constant of the same module that it names, directly or through
    others. Comments, docstrings, positions and the module's path change nothing. The library's own classes are not
    part of it.
    """
    classes = [one for one in task.__mro__ if not _is_library(one.__module__)]
    texts: dict[str, str] = {}
    for module in dict.fromkeys(one.__module__ for one in classes):
        names = [one.__name__ for one in classes if one.__module__ == module]
        source = inspect.getsource(sys.modules[module])
        texts |= {f"{rank}": text for rank, text in enumerate(used(source, names), len(texts))}
    return hashlib.sha256("\n".join(texts.values()).encode()).hexdigest()


def used(source: str, names: Iterable[str]) -> list[str]:
    """Return the normalised definitions of these names in a module's source, and of all that they use of it."""
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        defined |= dict.fromkeys(_names_of(node), node)
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name in found or name not in defined:
            continue
        node = _without_docstrings(defined[name])
        found[name] = ast.dump(node)
        waiting += [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    return [found[name] for name in sorted(found)]


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("headwise", "builtins", "abc", "typing", "pydantic")


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for one in ast.walk(node):
        if not isinstance(one, (ast.ClassDef, ast.FunctionDef)) or len(one.body) < 2:
            continue
        first = one.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            one.body = one.body[1:]
    return node
