"""What every host offers: the sites it finds in a model, and how to stand in their attention."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from headwise.core.site import Site
from headwise.hosts.code import forward_of, speaks_of_attention

if TYPE_CHECKING:
    from headwise.regularizing.fitted_site import Fitted


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


LIKE = re.compile(r"attention|attn|mhsa|gpsa", re.IGNORECASE)


def looks_like_attention(module: nn.Module) -> bool:
    """Tell whether a module holds parameters and is an attention layer by its class's name or by its forward's words.

    A forward that speaks of q, k and v, in itself or in its own methods, is attention's, whatever its class is called.
    """
    if next(module.parameters(), None) is None:
        return False
    return bool(LIKE.search(type(module).__name__)) or speaks_of_attention(module)


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
