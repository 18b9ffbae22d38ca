"""MethodState: the parameters, modules and values that a method keeps on one site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise.borders import MovedModule, in_transform, own_modules
from headwise.numerics.kernels import capturing

# Trainable dtypes: a learned parameter must not take the dtype of quantized weights.
TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The name of an empty buffer. Loading the state dict into a plain model fails, and torch's error shows this name, which
# states the remedy.
ADVICE = "fold_before_saving_or_regularize_before_loading"


class _Home(MovedModule):
    """Holds what one method keeps on a site.

    Buffers that no state dict holds get their number again where `to_empty()` has left memory without numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fills: dict[str, tuple[float, bool]] = {}

    def before_move(self) -> dict[str, bool]:
        return {name: getattr(self, name).is_meta for name in self.fills}

    def after_move(self, before: dict[str, bool]) -> None:
        for name, (number, written) in self.fills.items():
            # What a forward has written moves with the model, which only the meta device tells from `to_empty()`.
            if before[name] or not written:
                getattr(self, name).fill_(number)


class MethodState:
    """A method's own parameters and modules on one site, kept under the site's module as `headwise.<Method>`.

    Attributes:
        seed: seed of the initial parameters, the same in all processes.
        salt: separates the method's draws from those of all other methods on the site.
        strengths: the method's live settings by name, 0-d fp32 tensors, so that a change does not recompile graphs.
        written: the numbers that were last written into these tensors.
        layers: number of layers over which its penalties are averaged; 1 where they are summed.
        first: whether the site is the method's first, on which it does what the model needs once.
    """

    def __init__(
        self, owner: nn.Module, name: str, seed: int = 0, salt: int = 0, strengths: dict[str, Tensor] | None = None
    ) -> None:
        self._owner, self._name, self.seed, self.salt = owner, name, seed, salt
        self.strengths, self.layers, self.first = strengths or {}, 1, True
        self.written: dict[str, float] = {}
        self._kept: dict[str, Any] = {}

    def value(self, name: str) -> Tensor:
        """Return a live strength of the method, a 0-d tensor."""
        return self.strengths[name]

    def _home(self) -> _Home:
        if "headwise" not in own_modules(self._owner):
            self._owner.add_module("headwise", nn.Module())
        root = self._owner.get_submodule("headwise")
        if self._name not in own_modules(root):
            root.add_module(self._name, _Home())
        return cast(_Home, root.get_submodule(self._name))

    def _trainable_weight(self) -> Tensor | None:
        """Return a parameter of the layer itself in a trainable dtype, which quantized weights are not."""
        own = (p for name, p in self._owner.named_parameters() if not name.startswith("headwise."))
        return next((p for p in own if p.dtype in TRAINED), None)

    def mark(self) -> None:
        """Add an empty entry to the state dict, whose name tells users who load it into a plain model what to do."""
        if not hasattr(self._home(), ADVICE):
            self._home().register_buffer(ADVICE, torch.empty(0, dtype=torch.float32))

    def parameter(self, name: str, value: Tensor) -> nn.Parameter:
        """Register a learned parameter, in the device and dtype of the site's own parameters, and return it."""
        like = self._trainable_weight()
        self.mark()
        parameter = nn.Parameter(value if like is None else value.to(like.device, like.dtype))
        self._home().register_parameter(name, parameter)
        return parameter

    def module(self, name: str, module: nn.Module) -> nn.Module:
        """Register a learned module and return it."""
        self.mark()
        self._home().add_module(name, module)
        return module

    def buffer(self, name: str, value: Tensor, saved: bool = False) -> Tensor:
        """Register a buffer and return it.

        With `saved` it is part of the state dict, and is moved to the device of the site's own parameters.
        """
        if saved:
            like = self._trainable_weight()
            self.mark()
            value = value if like is None else value.to(like.device)
        self._home().register_buffer(name, value, persistent=saved)
        return value

    def fill(self, name: str, size: int, number: float, *, written: bool = False) -> None:
        """Register a buffer (size,) of one number, which is no part of the state dict.

        `written` says that forwards write it; `to_empty()` then keeps the number for models on the meta device alone.
        """
        device = next((p.device for p in self._owner.parameters()), None)
        home = self._home()
        home.fills[name] = (number, written)
        home.register_buffer(name, torch.full((size,), number, device=device, dtype=torch.float32), persistent=False)

    def tensor(self, name: str) -> Tensor:
        """Return the parameter or buffer of this name.

        Raises:
            AttributeError: if the method has neither on this site.
        """
        # get_submodule() would add guards to compiled graphs, which cannot split its dotted name either.
        root = own_modules(self._owner).get("headwise")
        home = None if root is None else own_modules(root).get(self._name)
        value = None if home is None else getattr(home, name, None)
        if not isinstance(value, Tensor):
            raise AttributeError(f"{self._name} keeps no {name!r} on this site")
        return value

    def writable(self, name: str) -> Tensor:
        """Return a buffer that a forward writes.

        Raises:
            RuntimeError: in a transform of torch.func, which may write nothing that it did not make.
        """
        if in_transform():
            raise RuntimeError(
                f"{self._name} stores numbers in each training forward, which transforms of torch.func (grad, vmap, "
                f"jvp) forbid: switch the model to evaluation with eval(), use torch.autograd, or leave "
                f"{self._name} out"
            )
        return self.tensor(name)

    def parameters(self) -> list[nn.Parameter]:
        """Return all that the method learns on the site."""
        return list(self._home().parameters()) if self.learns else []

    def keep(self, name: str, value: Any) -> None:
        """Keep a plain value, which is neither saved nor trained."""
        self._kept[name] = value

    def kept(self, name: str) -> Any:
        """Return the value that was kept under this name."""
        return self._kept[name]

    @property
    def learns(self) -> bool:
        """Return whether the method has parameters, modules or buffers on the site."""
        root = own_modules(self._owner).get("headwise")
        return root is not None and self._name in own_modules(root)

    def clear(self) -> None:
        """Remove the method's parameters, modules and buffers from the site's module."""
        root = own_modules(self._owner).get("headwise")
        if root is not None:
            own_modules(root).pop(self._name, None)
            if not own_modules(root):
                # The last method removes the root, so that the module has its plain names again.
                del own_modules(self._owner)["headwise"]


def strengths_on(strengths: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 0-d strengths as one tensor on a device.

    Numbers of the CPU are written there without a copy where they are equal, and always while a CUDA graph is captured:
    its replays would copy from memory that has been freed.
    """
    here = device.type != "cpu" and not torch.compiler.is_compiling() and all(s.device.type == "cpu" for s in strengths)
    if here and len(set(map(float, strengths))) == 1:
        return torch.full((len(strengths),), float(strengths[0]), device=device, dtype=torch.float32)
    if here and capturing():
        return torch.stack(
            [torch.full((), float(strength), device=device, dtype=torch.float32) for strength in strengths]
        )
    return torch.stack([strength.to(device, non_blocking=True) for strength in strengths])
