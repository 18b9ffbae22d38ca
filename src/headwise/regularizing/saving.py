"""Saving: a regularized model as a folder, and the folder as a stock model where that is exact.

A folder holds `model.safetensors` with the weights that a plain model computes with, so that it loads everywhere;
`headwise.safetensors` with what methods brought along; `headwise.json` with methods, layers and versions; and a model
card.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.method import Method
from headwise.files.durable import write_json
from headwise.files.optional_imports import needing
from headwise.methods.reparametrization import is_reparametrized
from headwise.projections.adapted import MERGE, is_adapted
from headwise.regularizing import model_card
from headwise.regularizing.handle_place import Handle

SETTINGS, LEARNED, WEIGHTS = "headwise.json", "headwise.safetensors", "model.safetensors"
FORMAT = 1
# what an earlier save may have left, sharded or whole: a reader would take it for this model's
STALE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
# a weight of this name in a folder makes plain loaders say what the model was trained with
MARK = "trained_with_{methods}__load_it_with_headwise.load_pretrained"
# of peft: transformers loads a folder's adapters onto its model by itself
ADAPTER = "adapter_config.json"
# of transformers' save_pretrained: other names of the files, other weights, a push of a part
REFUSED = ("variant", "state_dict", "push_to_hub", "is_main_process", "distributed_checkpoint")
# classes of torch that stand around a whole model, and the name under which they keep it
AROUND = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
# logits of an exported model may differ by this share of the largest one
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Exported:
    """What an export wrote; printing it says so.

    Attributes:
        folder: where the stock model lies.
        folded: methods whose effect lies in the plain weights now.
        left_out: methods that act in training alone, which the exported model does not need.
        difference: the largest difference between the outputs of the exported model, loaded again, and of this one, as
            a share of the largest output; None where there was no batch to run.
    """

    folder: Path
    folded: tuple[Method, ...]
    left_out: tuple[Method, ...]
    difference: float | None

    def __str__(self) -> str:
        lines = [f"a stock transformers model lies in {self.folder}: load it with from_pretrained"]
        if self.folded:
            lines.append(f"in its weights: {' + '.join(map(repr, self.folded))}")
        if self.left_out:
            lines.append(f"acted in training alone: {' + '.join(map(repr, self.left_out))}")
        lines.append(
            "not compared: pass example=batch to compare its outputs"
            if self.difference is None
            else f"loaded again, its outputs differ by {self.difference:.1e} of the largest"
        )
        return "\n".join(lines)


def save(handle: Handle, folder: str | Path, **options: Any) -> None:
    """Write a regularized model into a folder, from which `headwise.load_pretrained` reads it.

    Raises:
        ValueError: if adapters, shards or quantized weights stand in the model, or the folder is a file or holds
            adapters.
        TypeError: for an option after which the folder could not be read.
        ImportError: if safetensors is not installed; the message names the extra.
    """
    model, prefix = whole(handle.model)
    check_options(options)
    with needing("Saving a regularized model", "hf"):
        from safetensors.torch import save_file
    path = made_folder(folder)
    plain, own = split(model)
    names = "_and_".join(dict.fromkeys(type(m).__name__ for m in model_card.beyond_weights(handle.methods)))
    mark = {MARK.format(methods=names): torch.zeros(1)} if names else {}
    write_weights(model, plain | mark, path, **options)
    save_file(apart(own), path / LEARNED)
    write_json(path / SETTINGS, described(handle, model, prefix))
    model_card.write(
        path, model_card.text(handle.methods, handle.fitted, type(model), loads=True), type(model).__module__
    )


def export(handle: Handle, folder: str | Path, example: Any = None, **options: Any) -> Exported:
    """Write the model as a stock one of transformers, where its outputs are those of the regularized model in
    evaluation.

    Raises:
        ValueError: naming what cannot be folded; where the model is none of transformers', or holds adapters, shards or
            quantized weights.
        RuntimeError: if the outputs on `example` differ by more than 1e-5 of the largest.
    """
    (model, _), methods = whole(handle.model), handle.methods
    check_options(options)
    if not of_transformers(model):
        raise ValueError(
            f"export() writes models of transformers, and this is a {type(model).__name__}: call fold() and save its "
            "state_dict(), or as its own library does"
        )
    if kept := model_card.beyond_weights(methods):
        raise ValueError(
            f"{' + '.join(map(repr, kept))} cannot be folded: what "
            f"{'it computes' if len(kept) == 1 else 'they compute'} in evaluation is no plain weight of a stock model. "
            "Serve the model with headwise, from save_pretrained() and headwise.load_pretrained(), or train without"
        )
    path = made_folder(folder)
    write_weights(model, split(model)[0], path, **options)
    for name in (SETTINGS, LEARNED):
        (path / name).unlink(missing_ok=True)
    model_card.write(path, model_card.text(methods, handle.fitted, type(model), loads=False), type(model).__module__)
    difference = None if example is None else compared(model, path, example)
    folded = tuple(m for m in methods if m.overrides("fold"))
    return Exported(path, folded, tuple(m for m in methods if not m.overrides("fold")), difference)


def push(
    handle: Handle, repo_id: str, *, private: bool | None, token: str | bool | None, message: str, endpoint: str | None
) -> str:
    """Save a regularized model into a repository of a hub, and return the address of the commit.

    The text of a model card that lies there stays; the part about methods is written anew. Weights of an earlier save
    go.
    """
    with needing("Pushing to a hub", "hf"):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    hub = HfApi(endpoint=endpoint, token=token)
    name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
    there = hub.list_repo_files(name)
    check_adapters(name, there)
    with tempfile.TemporaryDirectory() as folder:
        if model_card.CARD in there:
            # into this folder itself: a card in the hub's cache may be an older one
            hub.hf_hub_download(name, model_card.CARD, local_dir=folder, force_download=True)
        save(handle, folder)
        files = [path for path in sorted(Path(folder).iterdir()) if path.is_file()]
        added = [CommitOperationAdd(path.name, path) for path in files]
        known = {path.name for path in files}
        stale = [CommitOperationDelete(file) for file in there if STALE.fullmatch(file) and file not in known]
        return str(hub.create_commit(name, [*added, *stale], commit_message=message).commit_url)


def described(handle: Handle, model: nn.Module, prefix: str) -> dict[str, Any]:
    """Return what a folder says of its methods, as plain numbers and text, with the layers' names in the model
    itself."""
    versions = {"headwise": sys.modules["headwise"].__version__}
    for package in ("torch", "transformers"):
        if package in sys.modules:
            versions[package] = importlib.metadata.version(package)
    state = handle.state()
    counters = {name.removeprefix(prefix): count for name, count in state["counters"].items()}
    return {
        "format": FORMAT,
        "model": type(model).__name__,
        "methods": [
            {
                "method": repr(method),
                "module": type(method).__module__,
                "layers": [
                    f.site.name.removeprefix(prefix) for f in handle.fitted if any(m is method for m in f.methods)
                ],
            }
            for method in handle.methods
        ],
        "seed": handle.shared.seed,
        "state": {**state, "counters": counters},
        "versions": versions,
    }


def whole(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model inside of what compiles, distributes or adapted it, and the prefix that its names have there.

    Raises:
        ValueError: as `check_plain` does.
    """
    check_plain(model)
    prefix = ""
    while True:
        around = AROUND.get(type(model).__name__) if type(model).__module__.startswith("torch.") else None
        if around is None and type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
            # Adapters that were merged leave their frame around the model.
            inner = model.get_base_model()  # type: ignore[operator]
            around = next(name for name, module in model.named_modules() if module is inner)
        if around is None:
            return model, prefix
        model, prefix = model.get_submodule(around), f"{prefix}{around}."


def check_plain(model: nn.Module) -> None:
    """Raise ValueError if the weights of a model are not all here as plain tensors."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(module).__name__} learns prompts by peft, which this folder would not hold and which cannot be "
                "merged: save them with peft's own save_pretrained, and regularize the model inside"
            )
        if is_adapted(module):
            raise ValueError(
                f"{name} carries adapters of peft, which this folder would not hold as they act: {MERGE}, then save"
            )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantized, and what it saves is not what methods see: save it before quantizing")
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise ValueError(f"{name} is sharded: gather the weights into a whole model on one process, then save that")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no value yet: load weights first")


def check_options(options: dict[str, Any]) -> None:
    """Raise TypeError for an option of transformers after which the folder could not be read."""
    if refused := [name for name in REFUSED if name in options]:
        raise TypeError(
            f"{', '.join(refused)} cannot be given here: the folder would not hold a whole model under the names that "
            "loaders look for; to push, call handle.push_to_hub()"
        )


def check_adapters(place: str | Path, files: Iterable[str]) -> None:
    """Raise ValueError if adapters lie that plain loaders would put onto the model."""
    if ADAPTER in files:
        raise ValueError(
            f"{place} holds adapters of peft ({ADAPTER}), which from_pretrained would put onto this model: choose "
            "another place, or move them away"
        )


def made_folder(folder: str | Path) -> Path:
    """Return a folder, made where it is not there.

    Raises:
        ValueError: if a file of that name stands there, or adapters lie in it.
    """
    path = Path(folder)
    if path.is_file():
        raise ValueError(f"{path} is a file: give the name of a folder")
    check_adapters(path, (ADAPTER,) if (path / ADAPTER).is_file() else ())
    path.mkdir(parents=True, exist_ok=True)
    return path


@torch.no_grad()
def split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state dict of the plain model that computes what this one does in evaluation, and what methods brought
    along."""
    own: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    computed: dict[tuple[int, str], Tensor] = {}
    with evaluating(model):
        for key, tensor in model.state_dict().items():
            place, _, rest = key.rpartition("parametrizations.")
            if ".headwise." in f".{key}":
                own[key] = tensor
            elif rest and is_reparametrized(module := model.get_submodule(place.rstrip(".")), rest.split(".")[0]):
                name = rest.split(".")[0]
                own[key] = tensor
                # layers that share their weights share what is computed, so that savers see one tensor
                if (id(module), name) not in computed:
                    computed[id(module), name] = getattr(module, name).detach().clone()
                plain[place + name] = computed[id(module), name]
            else:
                plain[key] = tensor
    return plain, own


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation, and back as each was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def write_weights(model: nn.Module, plain: dict[str, Tensor], path: Path, **options: Any) -> None:
    """Write plain weights, as transformers does where the model is one of its, and nothing of an earlier save beside
    them.

    What an earlier save left goes when all of the new one is written, so that an error costs nobody a model.
    """
    if options and not of_transformers(model):
        raise TypeError(
            f"{', '.join(options)} is for models of transformers alone, and this is a {type(model).__name__}"
        )
    with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as made:
        if of_transformers(model):
            model.save_pretrained(made, state_dict=plain, **options)  # type: ignore[operator]
        else:
            with needing("Saving a regularized model", "hf"):
                from safetensors.torch import save_file
            save_file(apart(plain), Path(made, WEIGHTS))
        for stale in [file for file in path.iterdir() if STALE.fullmatch(file.name)]:
            stale.unlink()
        for file in Path(made).iterdir():
            file.replace(path / file.name)


def of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers: other libraries' `save_pretrained` takes no weights from
    outside."""
    known = sys.modules.get("transformers.modeling_utils")
    return known is not None and isinstance(model, known.PreTrainedModel)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which no two share memory, as the format asks: it holds no two names of one."""
    seen: set[int] = set()
    given = {}
    for key, tensor in tensors.items():
        shared = tensor.untyped_storage().data_ptr() in seen
        seen.add(tensor.untyped_storage().data_ptr())
        given[key] = tensor.clone() if shared else tensor.contiguous()
    return given


@torch.no_grad()
def compared(model: nn.Module, path: Path, example: Any) -> float:
    """Return the largest difference of outputs between an exported model and this one, as a share of the largest
    output.

    Raises:
        RuntimeError: if it is above 1e-5, or above what the dtype can show.
    """
    again = loaded_again(model, path)
    with evaluating(model):
        ours, theirs = (_output(one, example).double() for one in (model, again))
    difference = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
    dtype = next(model.parameters()).dtype
    if not difference <= max(TOLERANCE, 8 * torch.finfo(dtype).eps):
        raise RuntimeError(
            f"the exported model differs by {difference:.1e} of the largest output from this one on the example: do "
            f"not use {path}; save_pretrained() and headwise.load_pretrained() keep the model as it is"
        )
    return difference


def loaded_again(model: nn.Module, path: Path) -> nn.Module:
    """Return a new model of the same class from a folder of transformers, on the same device and in the same dtype."""
    first = next(model.parameters())
    with quiet():
        again: nn.Module = type(model).from_pretrained(path, dtype=first.dtype, use_safetensors=True)  # type: ignore[attr-defined]
    return again.to(first.device).eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers load without a word: what it would say of a folder's mark is known here."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _output(model: nn.Module, example: Any) -> Tensor:
    if isinstance(example, dict):
        out = model(**example)
    else:
        out = model(*example) if isinstance(example, tuple | list) else model(example)
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        if isinstance(value := getattr(out, name, None), Tensor):
            return value
    tensors = [out] if isinstance(out, Tensor) else [t for t in _values(out) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        raise ValueError(f"{type(model).__name__} gives no tensor that could be compared: leave example= out")
    return tensors[0]


def _values(out: Any) -> list[Any]:
    return list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple | list) else []


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what a folder says of its methods.

    Raises:
        FileNotFoundError: if the folder is none that a handle saved.
        ValueError: if its file is damaged or of a newer version.
    """
    path = folder / SETTINGS
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder} on this machine: for a repository of a hub give what "
            "huggingface_hub.snapshot_download(repo_id) returns"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {SETTINGS} in {folder}: handle.save_pretrained() writes it; load a plain model with "
            "from_pretrained"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        methods = [(one["method"], one["module"], [str(name) for name in one["layers"]]) for one in found["methods"]]
        assert all(isinstance(text, str) and isinstance(module, str) for text, module, _ in methods)
        assert isinstance(found["seed"], int) and isinstance(found["state"], dict) and isinstance(found["model"], str)
        number = found["format"]
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(f"{path} is damaged: get the folder again, or save it anew") from None
    if number != FORMAT:
        raise ValueError(f"{path} is of format {number}, and this version of headwise reads {FORMAT}: update headwise")
    return dict(found)
