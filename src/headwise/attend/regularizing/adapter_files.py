"""What methods learned, in the folders of peft's adapters: saved and loaded with the adapters.

peft saves only its adapters, also in the checkpoints of a Trainer: without this a resumed run would start the methods'
parameters again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.projections.adapted import is_adapted
from headwise.attend.regularizing import saving
from headwise.attend.regularizing.handle_place import Handle
from headwise.attend.regularizing.learned_parameters import is_own
from headwise.files.durable import write_json
from headwise.files.tensor_files import LEARNED
from headwise.files.user_warnings import warn

METHODS = ("save_pretrained", "load_adapter")


class AdapterFiles:
    """The `save_pretrained` and `load_adapter` of one adapted model, extended by what headwise's methods learned.

    They are in the model's own `__dict__`, so that no other model is touched, and `remove` takes them away.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle, self.loading = handle, False
        for name in METHODS:
            handle.model.__dict__[name] = Extended(self, name)

    def remove(self) -> None:
        """Restore the model's own methods."""
        for name in METHODS:
            self.handle.model.__dict__.pop(name, None)

    def save_pretrained(self, folder: str | Path, *args: Any, **options: Any) -> None:
        """Write what the methods learned into each folder that holds an adapter."""
        if not options.get("is_main_process", True):
            return
        learned = self._learned(options.get("state_dict"))
        for path in (Path(folder), *(Path(folder, name) for name in getattr(self.handle.model, "peft_config", {}))):
            if (path / saving.ADAPTER).is_file():
                _save(learned, path / LEARNED)
                write_json(path / saving.SETTINGS, saving.described(self.handle, self.handle.model, ""))

    def load_adapter(self, folder: str | Path, adapter_name: str = "default", *args: Any, **options: Any) -> None:
        """Load what the methods learned along with an adapter that acts."""
        path, acts = Path(folder) / LEARNED, adapter_name in self._active()
        if path.is_file() and acts:
            load_learned(self.handle.model, path)
        elif path.is_file() or acts:
            names = " and ".join(repr(method) for method in self.handle.methods if method.has_parameters())
            why = f"{folder} holds no {LEARNED}" if acts else f"{adapter_name!r} is not the active adapter"
            warn(f"{why}: the adapter is loaded, and what {names} learned stays as it is")

    def _learned(self, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
        model = self.handle.model
        keys = learned_keys(model)
        given = model.state_dict() if state is None else state
        if missing := [key for key in keys if key not in given]:
            raise ValueError(f"state_dict= lacks {missing[0]}, which a method learned: leave state_dict= out")
        return {key: given[key] for key in keys}

    def _active(self) -> list[str]:
        active: Any = getattr(self.handle.model, "active_adapters", [])
        return list(active() if callable(active) else active)


class Extended:
    """One method of a model, after which headwise's part follows; a copy of the model gets a copy of it."""

    def __init__(self, files: AdapterFiles, name: str) -> None:
        self.files, self.name = files, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        model = self.files.handle.model
        self.files.loading = self.name == "load_adapter"
        try:
            result = getattr(type(model), self.name)(model, *args, **options)
        finally:
            self.files.loading = False
        getattr(self.files, self.name)(*args, **options)
        return result


def keep_with_adapters(handle: Handle) -> None:
    """Let an adapted model save and load what its methods learn along with its adapters."""
    model = handle.model
    learns = any(method.has_parameters() for method in handle.methods)
    if learns and all(hasattr(model, name) for name in METHODS) and any(map(is_adapted, model.modules())):
        handle.hooks.append(AdapterFiles(handle))


def learned_keys(model: nn.Module) -> list[str]:
    """Return the state-dict keys of what methods learn; not those of frozen weights under a reparametrization."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return [key for key in model.state_dict() if is_own(key) and key not in frozen]


@torch.no_grad()
def load_learned(model: nn.Module, path: Path) -> None:
    """Load a file of what methods learned into a model that is regularized with the same methods.

    Raises:
        ValueError: if the file is damaged or is of other methods, layers or shapes; nothing is loaded then.
    """
    stored, here = saving.tensors_of(path), model.state_dict()
    keys = learned_keys(model)
    problems = [f"{key} is missing" for key in keys if key not in stored]
    problems += [f"{key} has no place here" for key in stored if key not in here]
    problems += [
        f"{key} is {tuple(stored[key].shape)} there and {tuple(here[key].shape)} here"
        for key in keys
        if key in stored and stored[key].shape != here[key].shape
    ]
    if problems:
        raise ValueError(f"{path} does not fit these methods on these layers: {'; '.join(problems[:3])}")
    model.load_state_dict(stored, strict=False)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(saving.apart(tensors), path)
