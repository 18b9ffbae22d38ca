"""MethodState: the parameters, modules and values that a method keeps on one site."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Kinds of numbers that optimizers train: a learned parameter beside quantized weights takes none of theirs.
TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The name of an empty buffer. Loading into a plain model fails on it, and torch's error then names it: it is the
# remedy.
ADVICE = "fold_before_saving_or_regularize_before_loading"


class MethodState:
    """A method's own parameters and modules on one site; they live under the site's module as `headwise.<Method>`.

    Attributes:
        seed: of the methods, alike in all processes: from it a method draws what its parameters start from.
        salt: what tells its draws from those of all other methods on the site.
        strengths: the method's live settings by name, 0-d fp32 tensors: a changed one is a changed value, never a
            changed graph.
        layers: over how many layers its penalties are averaged; 1 where they are summed.
    """

    def __init__(
        self, owner: nn.Module, name: str, seed: int = 0, salt: int = 0, strengths: dict[str, Tensor] | None = None
    ) -> None:
        self._owner, self._name, self.seed, self.salt = owner, name, seed, salt
        self.strengths, self.layers = strengths or {}, 1
        self._kept: dict[str, Any] = {}

    def value(self, name: str) -> Tensor:
        """Return a live strength of the method, a 0-d tensor."""
        return self.strengths[name]

    def _home(self) -> nn.Module:
        if "headwise" not in self._owner._modules:
            self._owner.add_module("headwise", nn.Module())
        root = self._owner.get_submodule("headwise")
        if self._name not in root._modules:
            root.add_module(self._name, nn.Module())
        return root.get_submodule(self._name)

    def _served(self) -> Tensor | None:
        """Return a parameter of the layer itself whose kind of number can be trained: quantized weights cannot."""
        own = (p for name, p in self._owner.named_parameters() if not name.startswith("headwise."))
        return next((p for p in own if p.dtype in TRAINED), None)

    def mark(self) -> None:
        """Leave an empty entry in the state dict: a plain model that meets it names it, and so says what to do."""
        if not hasattr(self._home(), ADVICE):
            self._home().register_buffer(ADVICE, torch.empty(0))

    def parameter(self, name: str, value: Tensor) -> nn.Parameter:
        """Register a learned parameter beside the site's own, on their device and in their dtype."""
        served = self._served()
        self.mark()
        parameter = nn.Parameter(value if served is None else value.to(served.device, served.dtype))
        self._home().register_parameter(name, parameter)
        return parameter

    def module(self, name: str, module: nn.Module) -> nn.Module:
        """Register a learned module beside the site's own."""
        self.mark()
        self._home().add_module(name, module)
        return module

    def buffer(self, name: str, value: Tensor, saved: bool = False) -> Tensor:
        """Register a buffer; with `saved` it is part of the state dict, and stands on the device of the site's own
        parameters."""
        if saved:
            served = self._served()
            self.mark()
            value = value if served is None else value.to(served.device)
        self._home().register_buffer(name, value, persistent=saved)
        return value

    def tensor(self, name: str) -> Tensor:
        """Return the parameter or buffer of this name.

        Raises:
            AttributeError: naming the method, where it keeps none of this name here.
        """
        # Spelled out, and not by get_submodule(): inside compiled graphs each step is a guard, and texts are not cut up
        # there.
        root = self._owner._modules.get("headwise")
        home = None if root is None else root._modules.get(self._name)
        value = None if home is None else getattr(home, name, None)
        if not isinstance(value, Tensor):
            raise AttributeError(f"{self._name} keeps no {name!r} on this site")
        return value

    def keep(self, name: str, value: Any) -> None:
        """Keep a plain value (never saved, never trained)."""
        self._kept[name] = value

    def kept(self, name: str) -> Any:
        """Return the plain value of this name."""
        return self._kept[name]

    @property
    def learns(self) -> bool:
        """Return whether anything is kept under the site's module."""
        root = self._owner._modules.get("headwise")
        return root is not None and self._name in root._modules

    def clear(self) -> None:
        """Take everything away from the site's module."""
        root = self._owner._modules.get("headwise")
        if root is not None:
            root._modules.pop(self._name, None)
            if not root._modules:
                # Plain models know no such module: the last method to go takes it along.
                del self._owner._modules["headwise"]
