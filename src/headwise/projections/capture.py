"""Capture the queries, keys and values that a site's attention receives, without changing the model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Seen:
    """The queries, keys and values of one attention call, each (B, H, ..., D) in the host's layout."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class Arguments:
    """The arguments of one call of a module, for calling it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def seen(module: nn.Module, edit: Callable[[Tensor, bool], Tensor] | None = None) -> Iterator[list[Seen]]:
    """Collect the inputs of attention while `module` runs.

    Args:
        module: the attention module.
        edit: changes the attention's output; its second argument is whether the heads are dimension -2, as in
            transformers' interface.
    """
    calls: list[Seen] = []
    inside = {"module": 0, "attention": 0}

    def enter(*_: Any) -> None:
        inside["module"] += 1

    def leave(*_: Any) -> None:
        inside["module"] -= 1

    def wrap(function: Callable[..., Any], at: int, interface: bool) -> Callable[..., Any]:
        def attention(*args: Any, **kwargs: Any) -> Any:
            # A function of the interface calls F.scaled_dot_product_attention: only the outer call counts.
            if not inside["module"] or inside["attention"]:
                return function(*args, **kwargs)
            q, k, v = _three(args[at:], kwargs)
            calls.append(Seen(q.detach().clone(), k.detach().clone(), v.detach().clone()))
            inside["attention"] += 1
            try:
                result = function(*args, **kwargs)
            finally:
                inside["attention"] -= 1
            return result if edit is None else _edited(result, edit, interface)

        return attention

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        with _patched(wrap):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def _three(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    names = ("query", "key", "value")
    return tuple(args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))


def _edited(result: Any, edit: Callable[[Tensor, bool], Tensor], interface: bool) -> Any:
    if isinstance(result, tuple):
        return (edit(result[0], interface), *result[1:])
    return edit(result, interface)


@contextmanager
def _patched(wrap: Callable[..., Any]) -> Iterator[None]:
    functional = torch.nn.functional
    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = wrap(plain, 0, False)
    interface = _interface()
    try:
        if interface is None:
            yield
            return
        original = interface.get_interface

        def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return wrap(original(self, name, default), 1, True)

        interface.get_interface = get_interface
        try:
            yield
        finally:
            interface.get_interface = original
    finally:
        functional.scaled_dot_product_attention = plain


def _interface() -> Any:
    # Looked up in sys.modules: without an import of transformers by the user, none of its modules exists.
    utilities = sys.modules.get("transformers.modeling_utils")
    return getattr(utilities, "AttentionInterface", None)


@contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Enter eval mode without grad; restore modes, buffers and torch's generators afterwards."""
    modes = [(module, module.training) for module in root.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers() if buffer.device.type != "meta"]
    devices = list({p.device.index for p in root.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            root.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for buffer, saved in buffers:
                buffer.copy_(saved)


def arguments(root: nn.Module, module: nn.Module, run: Callable[[], Any]) -> Arguments | None:
    """Run the model and return the arguments of the first call of `module`, or None if it is not called."""
    calls: list[Arguments] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not calls:
            calls.append(Arguments(args, {name: _without_cache(value) for name, value in kwargs.items()}))
            raise _ReachedError

    # An exception ends the run at the module: the rest would cost time and may fail on a synthesised batch.
    handle = module.register_forward_pre_hook(keep, with_kwargs=True, prepend=True)
    try:
        run()
    except _ReachedError:
        pass
    finally:
        handle.remove()
    return calls[0] if calls else None


class _ReachedError(Exception):
    """Ends a run at the module whose arguments are needed."""


def _without_cache(value: Any) -> Any:
    # A cache grows with each call, so a repeated call would see more keys.
    return None if "Cache" in type(value).__name__ else value


def again(module: nn.Module, call: Arguments) -> None:
    """Call the module once more with the same arguments."""
    args = tuple(_without_cache(value) for value in call.args)
    module(*args, **copy.copy(call.kwargs))
