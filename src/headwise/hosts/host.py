"""What every host offers: the sites it finds in a model, and how to stand in their attention."""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
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
    return _words(function, "co_names")


def _words(function: Any, kind: str) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    words: set[str] = set()
    queue = [code] if code is not None else []
    while queue:
        current = queue.pop()
        words.update(getattr(current, kind))
        queue.extend(c for c in current.co_consts if inspect.iscode(c))
    return words


def forward_of(module: nn.Module) -> Any:
    """Give the function a module's forward is, its own where one was set on the instance."""
    return getattr(module.forward, "__func__", module.forward)


def reached(function: Any, cls: type, depth: int) -> Iterator[Any]:
    """Give a forward's function and what it calls by name, a few levels deep: own methods, functions of its modules."""
    queue, seen = [(function, depth)], set()
    while queue:
        current, left = queue.pop(0)
        current = inspect.unwrap(current)
        if current in seen or not hasattr(current, "__code__"):
            continue
        seen.add(current)
        yield current
        if left:
            queue += [(inner, left - 1) for inner in _called(current, cls)]


def _called(function: Any, cls: type) -> list[Any]:
    """Give the functions that a function's code names: globals, functions of modules, methods of its own class."""
    space = getattr(function, "__globals__", {})
    names, attributes = _globals_and_attributes(function)
    modules = [space[n] for n in names if inspect.ismodule(space.get(n)) and not space[n].__name__.startswith("torch")]
    found = [space.get(name) for name in sorted(names)]
    for name in sorted(attributes):
        # Without super() the first definition is the one that runs.
        methods = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
        found += methods if "super" in names else methods[:1]
        found += [vars(module).get(name) for module in modules]
    plain = (f.__func__ if isinstance(f, staticmethod | classmethod) else f for f in found)
    return [f for f in plain if inspect.isfunction(f) and not (f.__module__ or "").startswith("torch.")]


def _globals_and_attributes(function: Any) -> tuple[set[str], set[str]]:
    names: set[str] = set()
    attributes: set[str] = set()
    queue = [function.__code__]
    while queue:
        code = queue.pop()
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                attributes.add(step.argval)
        queue.extend(c for c in code.co_consts if inspect.iscode(c))
    return names, attributes


def calls(module: nn.Module, target: str, depth: int = 3) -> bool:
    """Tell whether a module's forward uses the name `target`, in itself or in what it calls, a few levels deep."""
    return _calls(forward_of(module), type(module), target, depth)


@functools.lru_cache(maxsize=1024)
def _calls(function: Any, cls: type, target: str, depth: int) -> bool:
    return any(target in names_used(inner) for inner in reached(function, cls, depth))


def uses(module: nn.Module, pattern: str, depth: int = 1) -> bool:
    """Tell whether a module's forward uses a name that contains `pattern`."""
    found = (names_used(inner) for inner in reached(forward_of(module), type(module), depth))
    return any(re.search(pattern, name) for names in found for name in names)


def passes_true(module: nn.Module, keyword: str) -> bool:
    """Tell whether a module's forward passes `keyword=True` to something, where its source can be read."""
    try:
        return bool(re.search(rf"\b{keyword}\s*=\s*True\b(?!\s*if)", inspect.getsource(forward_of(module)).partition(":")[2]))
    except (OSError, TypeError):
        return False


LIKE = re.compile(r"attention|attn|mhsa|gpsa", re.IGNORECASE)
TRIPLES = ({"q", "k", "v"}, {"query", "key", "value"}, {"queries", "keys", "values"})


def looks_like_attention(module: nn.Module) -> bool:
    """Tell whether a module holds parameters and is an attention layer by its class's name or by its forward's words.

    A forward that speaks of q, k and v, in itself or in its own methods, is attention's, whatever its class is called.
    """
    if next(module.parameters(), None) is None:
        return False
    return bool(LIKE.search(type(module).__name__)) or _speaks_of_attention(forward_of(module), type(module))


@functools.lru_cache(maxsize=1024)
def _speaks_of_attention(function: Any, cls: type) -> bool:
    if cls.__module__.startswith("torch."):
        return False
    words: set[str] = set()
    for inner in reached(function, cls, 1):
        words |= _words(inner, "co_varnames")
    return any(triple <= words for triple in TRIPLES)


def over_channels(module: nn.Module) -> str:
    """Say why no method has a meaning on a layer that attends over channels; empty where it attends over tokens."""
    if re.search(r"^XCA$|channel_?att", type(module).__name__, re.IGNORECASE):
        return "it attends from channel to channel, not from token to token, where no method has a meaning: leave it as it is"
    return ""


def is_cross(name: str, module: nn.Module) -> bool:
    """Tell from the module's declared kind or its name whether it attends from one sequence to another."""
    if getattr(module, "is_cross_attention", False):
        return True
    # The name within its layer: `encoder.layer.0.crossattention.self` is told by the module around it.
    within = re.split(r"(?:^|\.)\d+\.", name)[-1] if re.search(r"(?:^|\.)\d+\.", name) else name.rpartition(".")[2]
    told = f"{within} {type(module).__name__}".lower().replace("multiheadattention", "")
    return bool(re.search(r"cross|encoder_?attn|encdec|enc_dec|multihead_attn", told))


def attends_across(name: str, module: nn.Module) -> bool:
    """Tell whether queries are other tokens than keys: cross attention, a class token's own attention, a pool's latents."""
    if is_cross(name, module):
        return True
    if re.search(r"class_?att|att(entio)?n_?pool|resampler|perceiver", type(module).__name__, re.IGNORECASE):
        return True
    given = inspect.signature(forward_of(module)).parameters.values()
    needed = {p.name for p in given if p.default is p.empty}
    return bool(needed & {"context", "memory", "kv", "key_value", "encoder_hidden_states"})


def first_number(module: Any, *names: str) -> int | None:
    """Give the first of the attributes that is a whole number."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


class Hooks:
    """The hooks that bring a layer's input and output to a fitted site, as tokens (B, T, C).

    Args:
        fitted: the site.
        inside: whether the output projection runs inside the site's forward, so that one that never ran is noticed.
    """

    def __init__(self, fitted: Fitted, inside: bool = False) -> None:
        self.fitted, self.inside = fitted, inside
        self.left = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Show what enters the layer to the `hidden` stages; an edited input replaces the first."""
        self.left = False
        for name in ("hidden_states", "x", "query", "input"):
            if isinstance(kwargs.get(name), Tensor):
                edited = self._enter(module, kwargs[name])
                return None if edited is kwargs[name] else (args, {**kwargs, name: edited})
        if args and isinstance(args[0], Tensor):
            edited = self._enter(module, args[0])
            return None if edited is args[0] else ((edited, *args[1:]), kwargs)
        return None

    def _enter(self, module: nn.Module, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        tokens = as_tokens(module, x)
        edited = self.fitted.enter(tokens)
        return x if edited is tokens else from_tokens(module, edited, x.shape)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Show what leaves the output projection to the `branch` stages."""
        self.left = True
        tokens = as_tokens(module, output)
        edited = self.fitted.leave(tokens)
        return output if edited is tokens else from_tokens(module, edited, output.shape)

    def check_output(self) -> None:
        """Raise RuntimeError where the output projection did not run as a module, so that the `branch` stages were passed by."""
        if self.inside and not self.left:
            raise RuntimeError(
                f"{self.fitted.site.name} never called its output projection as a module, so that what acts after it did "
                "nothing; call the projection itself, not its weight, or leave the site out with where="
            )


def _channels_first(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.conv._ConvNd):
        return True
    kinds = [type(child) for child in module.children()]
    return any(issubclass(k, nn.Conv2d) for k in kinds) and not any(issubclass(k, nn.Linear) for k in kinds)


def as_tokens(module: nn.Module, x: Tensor) -> Tensor:
    """Give a layer's input or output as tokens (B, T, C): maps (B, C, H, W) and (B, H, W, C) are flattened."""
    if x.dim() <= 3:
        return x
    return x.flatten(2).transpose(1, 2) if _channels_first(module) else x.flatten(1, -2)


def from_tokens(module: nn.Module, tokens: Tensor, shape: torch.Size) -> Tensor:
    """Give tokens (B, T, C) the shape they had before `as_tokens`."""
    if len(shape) <= 3:
        return tokens
    return tokens.transpose(1, 2).reshape(shape) if _channels_first(module) else tokens.reshape(shape)
