"""The interface of a handle, and the place where a regularized model keeps it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method, SharedState, Site
from headwise.borders import COMPILED_INSIDE, FSDP1_INSIDE, own_modules

# A key of the model's __dict__: torch neither saves it nor registers it as a submodule, and a deep copy copies it.
HANDLE = "_headwise_handle"
# Attributes under which compiled, distributed and adapted models keep the model they wrap.
INSIDE = (COMPILED_INSIDE, "module", FSDP1_INSIDE)
INSIDE_PEFT = ("base_model", "model")


class Handle(Protocol):
    """The part of `Regularized` that saving, the Trainer's loss and callback and the call checks use."""

    model: nn.Module
    methods: list[Method]
    fitted: list[FittedLayer]
    shared: SharedState
    brought: list[str]
    seen_training: bool
    hooks: list[Any]

    def loss(self) -> Tensor: ...

    def after_step(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def strength_at(self, method: Method, name: str, step: int, site: Site) -> float: ...

    def drop_penalties(self) -> bool: ...


def kept_handle(model: nn.Module) -> Any:
    """Return the handle of a regularized model or of the model that it wraps.

    Raises:
        ValueError: if the model is not regularized.
    """
    seen: set[int] = set()
    inner: Any = model
    while isinstance(inner, nn.Module) and id(inner) not in seen:
        seen.add(id(inner))
        if HANDLE in inner.__dict__:
            return inner.__dict__[HANDLE]
        # Only peft's classes keep a whole model under the name "model"; elsewhere it is a part.
        names = (*INSIDE, *(INSIDE_PEFT if type(inner).__module__.startswith("peft.") else ()))
        inner = next((own_modules(inner)[name] for name in names if name in own_modules(inner)), None)
    raise ValueError(f"{type(model).__name__} is not regularized: call headwise.regularize(model, ...) first")
