"""Reparametrization: put a parametrization on a parameter and take it off, in the place where the parameter stood."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize


def reparametrize(module: nn.Module, name: str, by: nn.Module) -> None:
    """Let `module.name` be computed by `by` from the parameter, which keeps its identity.

    Raises:
        ValueError: where a parametrization stands there already.
    """
    if name in getattr(module, "parametrizations", {}):
        known = ", ".join(type(part).__name__ for part in module.parametrizations[name])
        raise ValueError(f"{type(module).__name__}.{name} is parametrized already by {known}; remove that first")
    places = list(module._parameters)
    parametrize.register_parametrization(module, name, by)
    module.__dict__.setdefault("_headwise_places", {})[name] = places


def restore(module: nn.Module, name: str, *, folded: bool) -> None:
    """Make `module.name` a plain parameter again: the same object, at its old place among the others.

    Args:
        module: the module.
        name: the parameter.
        folded: whether it takes the values the parametrization computes, bit for bit, or keeps those under it.
    """
    # A deep copy shares the class torch made for the parametrized module: what is taken off must be off this one alone.
    cls = type(module)
    module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
    parametrize.remove_parametrizations(module, name, leave_parametrized=folded)
    kept = module.__dict__.get("_headwise_places", {})
    places = kept.pop(name, [])
    if not kept:
        module.__dict__.pop("_headwise_places", None)
    now = dict(module._parameters)
    # State dicts list parameters in the order of registration.
    for key in [key for key in places if key in now] + [key for key in now if key not in places]:
        module._parameters[key] = module._parameters.pop(key)
