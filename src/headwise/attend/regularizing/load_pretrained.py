"""Loading of a folder that `handle.save_pretrained` wrote."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.core import Method
from headwise.attend.methods.text import parse
from headwise.attend.projections.adapted import is_adapted
from headwise.attend.regularizing import saving
from headwise.attend.regularizing.adapter_files import load_learned
from headwise.attend.regularizing.handle import Regularized
from headwise.attend.regularizing.learned_parameters import is_own
from headwise.attend.regularizing.regularize import regularize
from headwise.files.arguments import is_a
from headwise.files.errors import CheckpointError
from headwise.files.tensor_files import LEARNED, TensorFiles


def load_pretrained(model: nn.Module, folder: str | Path, *, example: Any = None) -> Regularized:
    """Fit the methods of a saved model onto a plain one, load all weights, and return the handle.

    The folder may also be a Trainer's checkpoint of a regularized model. For a model with adapters of peft it is one
    that the model's `save_pretrained` or a Trainer wrote while it was regularized: the methods are fitted and what they
    learned is loaded; peft loads the adapters.

    Args:
        model: a plain model, built like the saved one; its weights do not matter.
        folder: a local folder that `handle.save_pretrained` wrote; for a model with adapters, their folder.
        example: a batch, as for `regularize`, if shapes cannot be known from the model.

    Raises:
        FileNotFoundError: if the folder holds no methods.
        ValueError: if the folder is damaged, the model is of another class, has other layers or shapes, or a method
            is not known in this process; the model stays plain and keeps its weights then.
        ImportError: if safetensors is not installed; the message names the extra.

    Example:
        >>> import tempfile, torch, headwise
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        >>> config = BertConfig(vocab_size=64, **sizes)
        >>> handle = headwise.regularize(BertModel(config), headwise.GatedOutput())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     handle.save_pretrained(folder)
        ...     again = BertModel(BertConfig.from_pretrained(folder))
        ...     headwise.load_pretrained(again, folder)
        Regularized(GatedOutput(per="head"), 2 sites)
    """
    is_a("model", model, nn.Module, "a torch module")
    is_a("folder", folder, (str, Path), "a path")
    path = Path(folder)
    settings = saving.read_settings(path)
    if type(model).__name__ != settings["model"]:
        raise ValueError(
            f"{path} holds a {settings['model']}, and this model is a {type(model).__name__}: build that one"
        )
    methods = [_method(entry) for entry in settings["methods"]]
    adapted = any(map(is_adapted, model.modules()))
    plain, own = {} if adapted else _plain(model, path), _own(path)
    layers = {name for entry in settings["methods"] for name in entry["layers"]}
    handle = regularize(
        model,
        *methods,
        where=lambda site: site.name in layers,
        example=example,
        seed=settings["seed"],
        allow_none=True,
        draws=settings["state"].get("draws", "counter"),
    )
    try:
        _check_layers(handle, settings["methods"])
        handle.load_state(settings["state"])
        if adapted:
            load_learned(model, path / LEARNED)
        else:
            model.load_state_dict(_fitting(model, plain, own, path))
    except BaseException:
        handle.remove(discard=True)
        raise
    return handle


def _method(entry: dict[str, Any]) -> Method:
    try:
        (method,) = parse(entry["method"])
    except ValueError as error:
        hint = (
            ""
            if entry["module"].startswith("headwise.")
            else f" Import {entry['module']}, which defines it, before loading."
        )
        raise ValueError(f"the folder's method {entry['method'][:200]!r} cannot be made: {error}{hint}") from None
    return method


def _plain(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return the weights of the plain model, by the model's own names."""
    if saving.of_transformers(model):
        if not (path / "config.json").is_file():
            raise ValueError(f"{path / 'config.json'} is missing: get the folder again, or save it again")
        # transformers may store weights under other names, or split otherwise, than the model holds them
        try:
            return _stored(*saving.loaded_again(model, path))
        except CheckpointError as error:
            raise ValueError(
                f"the weights in {path} cannot be read ({error}): get the folder again, or save it again"
            ) from None
    return {k: t for k, t in saving.tensors_of(path / saving.WEIGHTS).items() if not k.startswith("trained_with_")}


def _own(path: Path) -> dict[str, Tensor]:
    """Return what the methods learned; a Trainer's checkpoint holds it together with the model's weights."""
    if not (path / LEARNED).is_file() and (path / "trainer_state.json").is_file():
        with suppress(CheckpointError):
            files = TensorFiles.of_folder(path)
            return files.read([name for name in files.names if is_own(name)])
    return saving.tensors_of(path / LEARNED)


def _stored(again: nn.Module, record: dict[str, Any]) -> dict[str, Tensor]:
    """Return what a folder holds by the names of the model that was loaded from it, in the folder's shapes."""
    state = {key: tensor for key, tensor in again.state_dict().items() if key not in record["missing_keys"]}
    for key in record["unexpected_keys"]:
        if not key.startswith("trained_with_"):
            state[key] = torch.empty(0, device="meta")
    return state | {key: torch.empty(there, device="meta") for key, there, _ in record["mismatched_keys"]}


def _check_layers(handle: Regularized, methods: list[dict[str, Any]]) -> None:
    for method, entry in zip(handle.methods, methods, strict=True):
        here = {f.site.name for f in handle.fitted if any(m is method for m in f.methods)}
        if here != set(entry["layers"]):
            groups = (("only here", here - set(entry["layers"])), ("only there", set(entry["layers"]) - here))
            lines = [f"{group}: {', '.join(sorted(names))}" for group, names in groups if names]
            raise ValueError(
                f"{entry['method']} is on other layers than in the saved model ({'; '.join(lines)}): build the "
                "model as it was"
            )


def _fitting(model: nn.Module, plain: dict[str, Tensor], learned: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the whole state dict of the regularized model; raise ValueError if the weights do not fit."""
    expected = model.state_dict()
    state = {key: learned.get(key, plain.get(key)) for key in expected}
    problems = [f"{key} is missing" for key, tensor in state.items() if tensor is None]
    problems += [
        f"{key} is {tuple(tensor.shape)} there and {tuple(expected[key].shape)} here"
        for key, tensor in state.items()
        if tensor is not None and tensor.shape != expected[key].shape
    ]
    problems += [f"{key} has no place here" for key in learned if key not in expected]
    # a weight that a reparametrization computes is not stored under its plain name
    covered = {key.replace("parametrizations.", "").removesuffix(".original") for key in expected if is_own(key)}
    problems += [f"{key} has no place here" for key in plain if key not in expected and key not in covered]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"the weights in {path} do not fit this model: {'; '.join(problems[:3])}{more}")
    return {key: tensor for key, tensor in state.items() if tensor is not None}
