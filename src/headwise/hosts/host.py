"""What every host offers: the sites it finds in a model, and how to stand in their attention."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..site import Site

if TYPE_CHECKING:
    from ..fitted import Fitted


class Adapter(Protocol):
    """Stands in one site's attention. `attach` may not fail half-way; `detach` leaves no trace."""

    def attach(self, fitted: Fitted) -> None:
        """Route the site's calls through `fitted`."""

    def detach(self) -> None:
        """Give the site back as it was."""


@dataclass
class Found:
    """An attention-like module: reachable by an adapter, or not and why."""

    site: Site
    adapter: Adapter | None
    reason: str = ""


def names_used(function: Any) -> set[str]:
    """Give the global and attribute names a function's code uses, inner functions included."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names: set[str] = set()
    queue = [code] if code is not None else []
    while queue:
        current = queue.pop()
        names.update(current.co_names)
        queue.extend(c for c in current.co_consts if inspect.iscode(c))
    return names


def calls(cls: type, target: str, depth: int = 3) -> bool:
    """Tell whether a module class's forward uses the name `target`, in itself or in what it calls, a few levels deep."""
    return _calls(cls.forward, cls, target, depth, set())  # type: ignore[attr-defined]


def _calls(function: Any, cls: type, target: str, depth: int, seen: set[Any]) -> bool:
    function = inspect.unwrap(function)
    if function in seen or not hasattr(function, "__code__"):
        return False
    seen.add(function)
    used = names_used(function)
    if target in used:
        return True
    if depth == 0:
        return False
    space = getattr(function, "__globals__", {})
    for name in used:
        inner = inspect.getattr_static(cls, name, None)
        inner = inner.__func__ if isinstance(inner, staticmethod | classmethod) else inner
        inner = inner if inspect.isfunction(inner) else space.get(name)
        own = inspect.isfunction(inner) and not (inner.__module__ or "").startswith("torch.")
        if own and _calls(inner, cls, target, depth - 1, seen):
            return True
    return False


LIKE = re.compile(r"attention|attn", re.IGNORECASE)


def looks_like_attention(module: nn.Module) -> bool:
    """Tell whether a module's class is named like an attention layer and holds parameters."""
    name = type(module).__name__
    return bool(LIKE.search(name)) and next(module.parameters(), None) is not None


def is_cross(name: str, module: nn.Module) -> bool:
    """Tell from the module's declared kind or its name whether it attends from one sequence to another."""
    if getattr(module, "is_cross_attention", False):
        return True
    last = name.rpartition(".")[2].lower() + type(module).__name__.lower()
    return bool(re.search(r"cross|encoder_?attn|encdec|enc_dec|multihead_attn", last.replace("multiheadattention", "")))


def first_number(module: Any, *names: str) -> int | None:
    """Give the first of the attributes that is a whole number."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


class Hooks:
    """The hooks that bring a layer's input and output to a fitted site."""

    def __init__(self, fitted: Fitted) -> None:
        self.fitted = fitted

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Show what enters the layer to the `hidden` stages; an edited input replaces the first."""
        for name in ("hidden_states", "x", "query", "input"):
            if isinstance(kwargs.get(name), Tensor):
                edited = self.fitted.enter(kwargs[name])
                return None if edited is kwargs[name] else (args, {**kwargs, name: edited})
        if args and isinstance(args[0], Tensor):
            edited = self.fitted.enter(args[0])
            return None if edited is args[0] else ((edited, *args[1:]), kwargs)
        return None

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Show what leaves the output projection to the `branch` stages."""
        return self.fitted.leave(output)
