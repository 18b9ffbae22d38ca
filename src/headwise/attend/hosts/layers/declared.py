"""Candidates, and what a module declares before any call: by its class, its names, its settings and its code."""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from headwise.attend.attention.fitted_layer import Adapter
from headwise.attend.core import Site
from headwise.attend.projections.names import QK_NORMS


@dataclass
class Candidate:
    """An attention-like module: its adapter, or None and the reason why it cannot be reached."""

    site: Site
    adapter: Adapter | None
    reason: str = ""


LIKE = re.compile(r"attention|attn|mhsa|gpsa", re.IGNORECASE)


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module has parameters and looks like attention by its class name or its forward.

    A forward with local variables such as q, k and v counts as attention, whatever the name of its class.
    """
    if next(module.parameters(), None) is None:
        return False
    return bool(LIKE.search(type(module).__name__)) or speaks_of_attention(module)


def over_channels(module: nn.Module) -> str:
    """Return why no method applies to a layer that attends over channels; an empty string for others."""
    if re.search(r"^XCA$|channel_?att", type(module).__name__, re.IGNORECASE):
        return (
            "it attends from channel to channel, not from token to token, where no method has a meaning: leave it as "
            "it is"
        )
    return ""


def without_softmax(module: nn.Module) -> str:
    """Return why no method applies to a layer with a recurrent state, not a softmax; an empty string for others."""
    kind = type(module).__name__
    if re.search(r"delta|linear_?att|lightning|retention|mamba|gla(?![a-z])", kind, re.IGNORECASE):
        return (
            f"it is a {kind}, which carries a state from token to token instead of a softmax over keys: there are "
            "no attention weights, so that no method has a meaning; methods apply to layers with full attention"
        )
    return ""


def is_cross(name: str, module: nn.Module) -> bool:
    """Return whether a module is cross attention, by its declared kind or its name."""
    if getattr(module, "is_cross_attention", False):
        return True
    # The name within its layer: in `encoder.layer.0.crossattention.self` only the parent's name shows it.
    within = re.split(r"(?:^|\.)\d+\.", name)[-1] if re.search(r"(?:^|\.)\d+\.", name) else name.rpartition(".")[2]
    words = f"{within} {type(module).__name__}".lower().replace("multiheadattention", "")
    return bool(re.search(r"cross|encoder_?attn|encdec|enc_dec|multihead_attn", words))


def normalises(module: nn.Module) -> bool:
    """Return whether a layer normalises its queries or keys, by the names of its parts."""
    norms = (getattr(module, name, None) for name in QK_NORMS)
    return any(isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) for norm in norms)


def attends_across(name: str, module: nn.Module) -> bool:
    """Return whether the keys are tokens other than the queries: cross attention, class attention, or a pool with
    latent queries."""
    if is_cross(name, module):
        return True
    if re.search(r"class_?att|att(entio)?n_?pool|resampler|perceiver", type(module).__name__, re.IGNORECASE):
        return True
    parameters = inspect.signature(forward_of(module)).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty}
    return bool(required & {"context", "memory", "kv", "key_value", "encoder_hidden_states"})


def shifts_windows(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules, an attention layer and its blocks, shifts windows, as every second block of
    Swin does."""
    # target_shift_size: the shift that timm uses again when the input grows.
    sizes = (getattr(module, name, 0) for module in modules for name in ("shift_size", "target_shift_size"))
    return any(any(size) if isinstance(size, tuple | list) else isinstance(size, int) and size > 0 for size in sizes)


def other_positions(module: nn.Module) -> bool:
    """Return whether a layer whose code supports rotary positions is configured for others: Falcon with ALiBi, ESM
    with absolute positions."""
    config = getattr(module, "config", None)
    if getattr(config, "alibi", False) is True:
        return True
    used = names_used(forward_of(module))
    for name in ("position_embedding_type", "position_embeddings_type"):
        kind = getattr(module, name, None) or getattr(config, name, None)
        if name in used and isinstance(kind, str):
            return not re.search("rot|rope", kind)
    return False


TRIPLES = ({"q", "k", "v"}, {"query", "key", "value"}, {"queries", "keys", "values"})


def names_used(function: Any) -> set[str]:
    """Return the global and attribute names that a function's code uses, including those of inner functions."""
    return _names_in_code(function, "co_names")


def _names_in_code(function: Any, kind: str) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    words: set[str] = set()
    queue = [code] if code is not None else []
    while queue:
        current = queue.pop()
        words.update(getattr(current, kind))
        queue.extend(c for c in current.co_consts if inspect.iscode(c))
    return words


def forward_of(layer: nn.Module | type) -> Any:
    """Return the forward function of a module or class; one set on the module itself takes precedence."""
    forward: Any = layer.forward  # type: ignore[union-attr]  # a class of modules has one too
    return getattr(forward, "__func__", forward)


def _class_of(layer: nn.Module | type) -> Any:
    # Any: with `type`, mypy confuses the `__hash__` that the caches below need with that of instances.
    return layer if isinstance(layer, type) else type(layer)


def reached(function: Any, cls: type, depth: int) -> Iterator[Any]:
    """Yield a forward function and the functions it calls by name, up to `depth` levels deep: methods of `cls` and
    functions of the modules that it uses."""
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
    """Return the functions that a function's code names: globals, functions of modules and methods of `cls`."""
    space = getattr(function, "__globals__", {})
    names, attributes = _globals_and_attributes(function.__code__)
    modules = [space[n] for n in names if inspect.ismodule(space.get(n)) and not space[n].__name__.startswith("torch")]
    values = [space.get(name) for name in sorted(names)]
    for name in sorted(attributes):
        # Without super() only the first definition runs.
        methods = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
        values += methods if "super" in names else methods[:1]
        values += [vars(module).get(name) for module in modules]
    functions = (f.__func__ if isinstance(f, staticmethod | classmethod) else f for f in values)
    return [f for f in functions if inspect.isfunction(f) and not (f.__module__ or "").startswith("torch.")]


# Cached: disassembling is slow, and the layers of a model share their code.
@functools.lru_cache(maxsize=4096)
def _globals_and_attributes(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    names: set[str] = set()
    attributes: set[str] = set()
    queue = [code]
    while queue:
        current = queue.pop()
        for step in dis.get_instructions(current):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                attributes.add(step.argval)
        queue.extend(c for c in current.co_consts if inspect.iscode(c))
    return frozenset(names), frozenset(attributes)


def calls(layer: nn.Module | type, target: str, depth: int = 3) -> bool:
    """Return whether the forward of a module or class, or a function that it calls up to `depth` levels deep, uses the
    name `target`."""
    return target in _names(forward_of(layer), _class_of(layer), depth)


def uses(module: nn.Module, pattern: str, depth: int = 1) -> bool:
    """Return whether a module's forward uses a name that contains `pattern`."""
    return any(re.search(pattern, name) for name in _names(forward_of(module), _class_of(module), depth))


# Cached by class: reading code instruction by instruction is slow, and the layers of a model share it.
@functools.lru_cache(maxsize=1024)
def _names(function: Any, cls: Any, depth: int) -> frozenset[str]:
    return frozenset().union(*(names_used(inner) for inner in reached(function, cls, depth)))


def speaks_of_attention(module: nn.Module) -> bool:
    """Return whether a module's forward, or a method it calls, has local variables such as q, k and v."""
    return not type(module).__module__.startswith("torch.") and _has_triple(forward_of(module), _class_of(module))


@functools.lru_cache(maxsize=1024)
def _has_triple(function: Any, cls: Any) -> bool:
    words = set().union(*(_names_in_code(inner, "co_varnames") for inner in reached(function, cls, 1)))
    return any(triple <= words for triple in TRIPLES)


def passes_true(module: nn.Module, keyword: str) -> bool:
    """Return whether the source of a module's forward contains `keyword=True`; False if it cannot be read."""
    try:
        return bool(
            re.search(rf"\b{keyword}\s*=\s*True\b(?!\s*if)", inspect.getsource(forward_of(module)).partition(":")[2])
        )
    except (OSError, TypeError):
        return False
