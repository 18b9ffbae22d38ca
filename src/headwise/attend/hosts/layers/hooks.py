"""Hooks that pass a layer's input and the output of its branch to a fitted site, as tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core.shared_state import Entered
from headwise.borders import Convolution
from headwise.files.errors import LEAVE_OUT


class Hooks:
    """The hooks that pass a layer's input and output to a fitted site, as tokens (B, T, C).

    Args:
        inside: whether the output projection runs inside the site's forward; if it does and never ran, `check_output`
            raises.
    """

    def __init__(self, fitted: FittedLayer, inside: bool = False) -> None:
        self.fitted, self.inside = fitted, inside
        self.left = False
        self.arrived = Entered()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Pass the layer's input through the `hidden` stages; an edited input replaces the original."""
        self.left = False
        self.arrived.take()
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

    def follow(self, output: nn.Module, last: nn.Module | None) -> list[Any]:
        """Hook the output projection, or the last dropout or norm between it and the residual; return the handles."""
        if last is None:
            return [output.register_forward_hook(self.after)]
        # A layer may call one dropout in several places: its first call after the projection is the one to hook.
        return [output.register_forward_hook(self.before_last), last.register_forward_hook(self.after_last)]

    def before_last(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record that the output projection has run."""
        self.arrived.put(module)

    def after_last(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Pass the output of the last module before the residual through the `branch` stages."""
        projection = self.arrived.take()
        return output if projection is None else self.after(projection, args, output)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Pass the output of the output projection through the `branch` stages."""
        self.left = True
        tokens = as_tokens(module, output)
        edited = self.fitted.leave(tokens)
        return output if edited is tokens else from_tokens(module, edited, output.shape)

    def check_output(self) -> None:
        """Raise RuntimeError if the output projection did not run as a module, so that the `branch` stages were
        skipped."""
        if self.inside and not self.left:
            raise RuntimeError(
                f"{self.fitted.site.name} never called its output projection as a module, so methods that act after it "
                f"had no effect: call the projection itself instead of using its weight, or {LEAVE_OUT}"
            )


def _channels_first(module: nn.Module) -> bool:
    if isinstance(module, Convolution):
        return True
    kinds = [type(child) for child in module.children()]
    return any(issubclass(k, nn.Conv2d) for k in kinds) and not any(issubclass(k, nn.Linear) for k in kinds)


def as_tokens(module: nn.Module, x: Tensor) -> Tensor:
    """Return a layer's input or output as tokens (B, T, C); maps (B, C, H, W) or (B, H, W, C) are flattened."""
    if x.dim() <= 3:
        return x
    return x.flatten(2).transpose(1, 2) if _channels_first(module) else x.flatten(1, -2)


def from_tokens(module: nn.Module, tokens: Tensor, shape: torch.Size) -> Tensor:
    """Return tokens (B, T, C) in the shape that they had before `as_tokens`."""
    if len(shape) <= 3:
        return tokens
    return tokens.transpose(1, 2).reshape(shape) if _channels_first(module) else tokens.reshape(shape)
