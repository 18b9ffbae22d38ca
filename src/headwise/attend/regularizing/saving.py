"""Saving of a regularized model to a folder, and export to a stock model if that is exact.

A folder holds `model.safetensors` with the weights of a plain model, so that it loads everywhere;
`headwise.safetensors` with the tensors that methods added; `headwise.json` with methods, layers and versions; and a
model card.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise.attend.core import Method
from headwise.attend.core.random_draws import DRAWS
from headwise.attend.methods.reparametrization import is_reparametrized
from headwise.attend.projections.adapted import MERGE, is_adapted
from headwise.attend.projections.capture import evaluating, feed
from headwise.attend.regularizing import model_card
from headwise.attend.regularizing.handle_place import Handle
from headwise.borders import COMPILED_INSIDE
from headwise.files.durable import write_json
from headwise.files.foreign_models import harmless, model_of
from headwise.files.optional_imports import needing, quiet_transformers
from headwise.files.ownership import MARKER, claim
from headwise.files.tensor_files import LEARNED, TensorFiles, parsed

SETTINGS, WEIGHTS = "headwise.json", "model.safetensors"
FORMAT = 1
# files of an earlier save, sharded or whole, which a loader would take for this model's
STALE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
# a weight of this name makes plain loaders warn, with the names of the methods
MARK = "trained_with_{methods}__load_it_with_headwise.load_pretrained"
# peft's file: transformers loads a folder's adapters onto its model automatically
ADAPTER = "adapter_config.json"
# options of transformers' save_pretrained that change file names or weights, or push only a part
REFUSED = ("variant", "state_dict", "push_to_hub", "is_main_process", "distributed_checkpoint")
# classes of torch that wrap a whole model, and the name of the submodule that holds it
AROUND = {"OptimizedModule": COMPILED_INSIDE, "DistributedDataParallel": "module"}
# logits of an exported model may differ by this share of the largest one
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Exported:
    """The result of an export; printing it gives a summary.

    Attributes:
        folder: the folder of the stock model.
        folded: methods whose effect is now in the plain weights.
        left_out: methods that act in training only, which the exported model does not need.
        difference: the largest difference between the outputs of the exported model, loaded again, and of this one, as
            a share of the largest output; None without an example batch.
    """

    folder: Path
    folded: tuple[Method, ...]
    left_out: tuple[Method, ...]
    difference: float | None

    def __str__(self) -> str:
        lines = [f"a stock transformers model is in {self.folder}: load it with from_pretrained"]
        if self.folded:
            lines.append(f"in its weights: {' + '.join(map(repr, self.folded))}")
        if self.left_out:
            lines.append(f"acted in training only: {' + '.join(map(repr, self.left_out))}")
        lines.append(
            "not compared: pass example=batch to compare its outputs"
            if self.difference is None
            else f"loaded again, its outputs differ by {self.difference:.1e} of the largest"
        )
        return "\n".join(lines)


def save(handle: Handle, folder: str | Path, **options: Any) -> None:
    """Write a regularized model into a folder, from which `headwise.load_pretrained` reads it.

    Raises:
        ValueError: if the model holds adapters, shards or quantized weights, or the folder is a file, or holds
            adapters or a model that headwise did not save.
        TypeError: if an option would make the folder unreadable.
        ImportError: if safetensors is not installed; the message names the extra.
    """
    model, prefix = whole(handle.model)
    check_options(options)
    with needing("Saving a regularized model", "hf"):
        from safetensors.torch import save_file
    path = made_folder(folder)
    plain, own = split(model)
    names = "_and_".join(dict.fromkeys(type(m).__name__ for m in model_card.beyond_weights(handle.methods)))
    mark = {MARK.format(methods=names): torch.zeros(1, dtype=torch.float32)} if names else {}
    with new_files(path) as written:
        write_weights(model, plain | mark, written, **options)
        save_file(apart(own), written / LEARNED)
        write_json(written / SETTINGS, described(handle, model, prefix))
    model_card.write(
        path, model_card.text(handle.methods, handle.fitted, type(model), loads=True), type(model).__module__
    )


def export(handle: Handle, folder: str | Path, example: Any = None, **options: Any) -> Exported:
    """Write the model as a stock model of transformers with the outputs of the regularized model in evaluation.

    Raises:
        ValueError: if a method cannot be folded, the model is not one of transformers, or it holds adapters, shards or
            quantized weights.
        RuntimeError: if the outputs on `example` differ by more than 1e-5 of the largest.
    """
    (model, _), methods = whole(handle.model), handle.methods
    check_options(options)
    if not of_transformers(model):
        raise ValueError(
            f"export() writes models of transformers, and this is a {type(model).__name__}: call fold() and save its "
            "state_dict(), or use its own library to save it"
        )
    if beyond := model_card.beyond_weights(methods):
        raise ValueError(
            f"{' + '.join(map(repr, beyond))} cannot be folded: what "
            f"{'it computes' if len(beyond) == 1 else 'they compute'} in evaluation is not a plain weight of a stock "
            "model. Serve the model with headwise, from save_pretrained() and headwise.load_pretrained(), or train "
            "without"
        )
    path = made_folder(folder)
    with new_files(path) as written:
        write_weights(model, split(model)[0], written, **options)
    model_card.write(path, model_card.text(methods, handle.fitted, type(model), loads=False), type(model).__module__)
    difference = None if example is None else compared(model, path, example)
    folded = tuple(m for m in methods if m.overrides("fold"))
    return Exported(path, folded, tuple(m for m in methods if not m.overrides("fold")), difference)


def push(
    handle: Handle, repo_id: str, *, private: bool | None, token: str | bool | None, message: str, endpoint: str | None
) -> str:
    """Save a regularized model into a repository of a hub, and return the address of the commit.

    The rest of an existing model card is kept; its part about methods is replaced. Weights of an earlier save are
    removed.
    """
    with needing("Pushing to a hub", "hf"):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    hub = HfApi(endpoint=endpoint, token=token)
    name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
    existing = hub.list_repo_files(name)
    check_adapters(name, existing)
    with tempfile.TemporaryDirectory() as folder:
        if model_card.CARD in existing:
            # downloaded into this folder, because a card in the hub's cache may be outdated
            hub.hf_hub_download(name, model_card.CARD, local_dir=folder, force_download=True)
        save(handle, folder)
        files = [path for path in sorted(Path(folder).iterdir()) if path.is_file() and path.name != MARKER]
        added = [CommitOperationAdd(path.name, path) for path in files]
        saved = {path.name for path in files}
        stale = [CommitOperationDelete(file) for file in existing if STALE.fullmatch(file) and file not in saved]
        return str(hub.create_commit(name, [*added, *stale], commit_message=message).commit_url)


def described(handle: Handle, model: nn.Module, prefix: str) -> dict[str, Any]:
    """Return a folder's record of its methods, as plain numbers and text, with names of layers in the model itself."""
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
                "module": _place_of(type(method)),
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


def _place_of(cls: type) -> str:
    """Return the module to import before a class can be read back; one word for all of headwise's own."""
    return "headwise.methods" if cls.__module__.startswith("headwise.") else cls.__module__


def describe_checkpoint(handle: Handle, folder: Path) -> None:
    """Write the record of methods into a Trainer's checkpoint of the whole model, for `headwise.load_pretrained`."""
    if not any((folder / name).is_file() for name in (WEIGHTS, f"{WEIGHTS}.index.json")):
        return
    # Of shards and adapters no plain model is made: such checkpoints are resumed by the Trainer alone.
    with suppress(ValueError):
        model, prefix = whole(handle.model)
        write_json(folder / SETTINGS, described(handle, model, prefix))


def whole(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model without the modules that compile, distribute or adapt it, and the prefix of its names there.

    Raises:
        ValueError: as `check_plain` does.
    """
    check_plain(model)
    prefix = ""
    while True:
        wrapped = AROUND.get(type(model).__name__) if type(model).__module__.startswith("torch.") else None
        if wrapped is None and type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
            # After a merge of its adapters, the peft model still wraps the model.
            inner = model.get_base_model()  # type: ignore[operator]
            wrapped = next(name for name, module in model.named_modules() if module is inner)
        if wrapped is None:
            return model, prefix
        model, prefix = model.get_submodule(wrapped), f"{prefix}{wrapped}."


def check_plain(model: nn.Module) -> None:
    """Raise ValueError if a weight of a model is not a plain tensor in this process."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(module).__name__} learns prompts of peft, which cannot be merged and which this folder would "
                "not hold: save them with peft's own save_pretrained, and regularize the model inside"
            )
        if is_adapted(module):
            raise ValueError(
                f"{name} carries adapters of peft, which this folder would not hold as they act: {MERGE}, then save"
            )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantized, so that it saves other weights than methods see: save it before quantizing"
        )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise ValueError(f"{name} is sharded: gather the weights into a whole model on one process, then save that")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no value yet: load weights first")


def check_options(options: dict[str, Any]) -> None:
    """Raise TypeError if an option of transformers would make the folder unreadable."""
    if refused := [name for name in REFUSED if name in options]:
        raise TypeError(
            f"{', '.join(refused)} cannot be given here: the folder would not hold a whole model under the names that "
            "loaders look for; to push, call handle.push_to_hub()"
        )


def check_adapters(place: str | Path, files: Iterable[str]) -> None:
    """Raise ValueError if a folder holds adapters, which plain loaders would put onto the model."""
    if ADAPTER in files:
        raise ValueError(
            f"{place} holds adapters of peft ({ADAPTER}), which from_pretrained would put onto this model: choose "
            "another place, or move them away"
        )


def made_folder(folder: str | Path) -> Path:
    """Return a folder, and create it if it does not exist.

    Raises:
        ValueError: if the path is a file, or the folder holds adapters.
    """
    path = Path(folder)
    if path.is_file():
        raise ValueError(f"{path} is a file: give the name of a folder")
    check_adapters(path, (ADAPTER,) if (path / ADAPTER).is_file() else ())
    path.mkdir(parents=True, exist_ok=True)
    return path


@torch.no_grad()
def split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state dict of the plain model with this model's outputs in evaluation, and the methods' tensors."""
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
                # layers with shared weights share the computed tensor, so that savers see a single one
                if (id(module), name) not in computed:
                    computed[id(module), name] = getattr(module, name).detach().clone()
                plain[place + name] = computed[id(module), name]
            else:
                plain[key] = tensor
    return plain, own


@contextmanager
def new_files(path: Path) -> Iterator[Path]:
    """Yield a folder whose files move into the folder of a model at the end, in place of those of an earlier save.

    The earlier files are removed after the new ones are written, so that no error loses a model.

    Raises:
        ValueError: if a file that would be replaced or removed was not written by headwise.
    """
    with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as written:
        yield Path(written)
        new = {file.name: file for file in Path(written).iterdir()}
        stale = [file.name for file in path.iterdir() if STALE.fullmatch(file.name)]
        claim(path, dict.fromkeys([*new, *stale, SETTINGS, LEARNED]), "folder", shared=True)
        for name in {*stale, SETTINGS, LEARNED} - new.keys():
            (path / name).unlink(missing_ok=True)
        for name, file in new.items():
            file.replace(path / name)


def write_weights(model: nn.Module, plain: dict[str, Tensor], path: Path, **options: Any) -> None:
    """Write plain weights into an empty folder, with transformers' own function for its models."""
    if options and not of_transformers(model):
        raise TypeError(
            f"{', '.join(options)} is only for models of transformers, and this is a {type(model).__name__}: leave it "
            "out"
        )
    if of_transformers(model):
        model.save_pretrained(path, state_dict=plain, **options)  # type: ignore[operator]
        return
    with needing("Saving a regularized model", "hf"):
        from safetensors.torch import save_file
    save_file(apart(plain), path / WEIGHTS)


def of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, whose `save_pretrained` alone accepts a state dict."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without shared memory, which safetensors does not allow."""
    seen: set[int] = set()
    separate = {}
    for key, tensor in tensors.items():
        shared = tensor.untyped_storage().data_ptr() in seen
        seen.add(tensor.untyped_storage().data_ptr())
        separate[key] = tensor.clone() if shared else tensor.contiguous()
    return separate


@torch.no_grad()
def compared(model: nn.Module, path: Path, example: Any) -> float:
    """Return the largest difference between the outputs of an exported model and this one, relative to the largest.

    Raises:
        RuntimeError: if it is above 1e-5 and above eight roundings of the dtype.
    """
    again, _ = loaded_again(model, path)
    with evaluating(model):
        ours, theirs = (_output(run, example).double() for run in (model, again))
    difference = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
    dtype = next(model.parameters()).dtype
    if not difference <= max(TOLERANCE, 8 * torch.finfo(dtype).eps):
        raise RuntimeError(
            f"the exported model differs by {difference:.1e} of the largest output from this one on the example: do "
            f"not use {path}; save_pretrained() and headwise.load_pretrained() keep the model as it is"
        )
    return difference


def loaded_again(model: nn.Module, path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return a new model like this one with the weights of a folder of transformers, and what did not fit.

    Only tensors are read from the folder, which a stranger may have written; the settings are those of the model.

    Raises:
        CheckpointError: if the folder holds no safetensors, or damaged ones.
    """
    first, files, own = next(model.parameters()), TensorFiles.of_folder(path), cast(Any, model).config
    config = type(own).from_dict(harmless(own.to_dict()))
    # it would warn about the folder's mark
    with quiet_transformers():
        again, record = model_of(
            type(model), config, files.read(files.names), dtype=first.dtype, ignore_mismatched_sizes=True
        )
    return again.to(first.device), record


def _output(model: nn.Module, example: Any) -> Tensor:
    out = feed(model, example)
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        if isinstance(value := getattr(out, name, None), Tensor):
            return value
    tensors = [out] if isinstance(out, Tensor) else [t for t in _values(out) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        raise ValueError(f"{type(model).__name__} returns no tensor that could be compared: leave example= out")
    return tensors[0]


def _values(out: Any) -> list[Any]:
    return list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple | list) else []


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; raise ValueError if it is missing or damaged."""
    with needing("Loading a regularized model", "hf"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    if not path.is_file():
        raise ValueError(f"{path} is missing: get the folder again, or save it again")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): get the folder again, or save it again") from None


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a folder's record of its methods.

    Raises:
        FileNotFoundError: if no handle saved the folder.
        ValueError: if its file is damaged or of a newer version.
    """
    path = folder / SETTINGS
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder} on this machine: for a repository of a hub pass the result of "
            "huggingface_hub.snapshot_download(repo_id)"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {SETTINGS} in {folder}: handle.save_pretrained() writes it; load a plain model with "
            "from_pretrained"
        )
    try:
        settings = parsed(path.read_text(encoding="utf-8"))
        methods = [(entry["method"], entry["module"]) for entry in settings["methods"]]
        layers = [entry["layers"] for entry in settings["methods"]]
        assert all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in layers)
        assert methods and all(isinstance(text, str) and isinstance(module, str) for text, module in methods)
        assert (
            isinstance(settings["seed"], int)
            and isinstance(settings["state"], dict)
            and settings["state"].get("draws", "counter") in DRAWS
            and isinstance(settings["model"], str)
        )
        number = settings["format"]
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(f"{path} is damaged: get the folder again, or save it again") from None
    if number != FORMAT:
        raise ValueError(f"{path} is of format {number}, and this version of headwise reads {FORMAT}: update headwise")
    return dict(settings)
