"""The reader of a checkpoint's safetensors files, tensor by tensor, and of its JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.borders import COMPILED_INSIDE
from headwise.files.errors import CheckpointError
from headwise.files.optional_imports import load

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npz", ".h5", ".msgpack")
PICKLE_REMEDY = (
    "Unpickling can run code, so headwise reads safetensors only. If you trust the file, convert it once: "
    "state = torch.load(FILE, weights_only=True); safetensors.torch.save_file(state, 'model.safetensors')"
)

# files with what methods or adapters learned, next to a model's weights
LEARNED, ADAPTER = "headwise.safetensors", "adapter_model.safetensors"
PARTS = (LEARNED, ADAPTER)

# levels of JSON, of which configs have fewer than ten
DEEPEST = 100
# what torch.compile puts into the names of the modules that it wraps
COMPILED = f"{COMPILED_INSIDE}."


class TensorFiles:
    """The tensors of one or several safetensors files, by name; each is read on demand.

    Attributes:
        prefix: what was removed from the names, which torch.compile and DistributedDataParallel put there.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        whole = "module." if files and all(name.startswith("module.") for name in files) else ""
        stored = {name: name.removeprefix(whole).replace(COMPILED, "") for name in files}
        if len(set(stored.values())) < len(stored):
            stored = {name: name for name in files}
        compiled = COMPILED if any(COMPILED in name for name in files) else ""
        self.prefix = whole + compiled if stored.keys() != set(stored.values()) else ""
        self._files = {stored[name]: path for name, path in files.items()}
        self._stored = {short: name for name, short in stored.items()}

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Return tensors by name; nothing else of the files is loaded.

        Raises:
            CheckpointError: if a name is missing or a file is damaged.
        """
        missing = [name for name in names if name not in self._files]
        if missing:
            raise CheckpointError(f"the checkpoint holds no tensor {missing[0]!r}; it holds {_some(self.names)}")
        read = {}
        for path in dict.fromkeys(self._files[name] for name in names):
            with opened(path) as file:
                inside = set(file.keys())
                for name in names:
                    if self._files[name] == path:
                        if self._stored[name] not in inside:
                            raise CheckpointError(
                                f"{path.name} does not hold {name!r}, which its index lists. Download both again"
                            )
                        read[name] = file.get_tensor(self._stored[name])
        return read

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, without reading the tensors."""
        return {name: tuple(part.get_shape()) for name, part in self._headers()}

    def of_eight_bits(self) -> list[str]:
        """Return the names of the tensors that hold floating-point numbers of 8 bits."""
        return [name for name, part in self._headers() if part.get_dtype().startswith("F8")]

    def _headers(self) -> Iterator[tuple[str, Any]]:
        for path in dict.fromkeys(self._files.values()):
            with opened(path) as file:
                inside = set(file.keys())
                for name, stored in self._stored.items():
                    if self._files[name] == path and stored in inside:
                        yield name, file.get_slice(stored)

    @classmethod
    def of_folder(cls, folder: Path) -> TensorFiles:
        """Return the weights of a transformers folder: one file, or several files with an index.

        Raises:
            CheckpointError: if there are none, they are pickled, or a shard is missing or damaged.
        """
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").is_file():
            return cls.of_file(folder / "model.safetensors")
        if index.is_file():
            return cls._of_index(index)
        others = sorted(path for path in folder.glob("*.safetensors") if path.name not in PARTS)
        if len(others) == 1:
            return cls.of_file(others[0])
        raise CheckpointError(_no_weights(folder))

    @classmethod
    def of_file(cls, path: Path) -> TensorFiles:
        """Return the tensors of one file."""
        with opened(path) as file:
            return cls(dict.fromkeys(file.keys(), path))

    @classmethod
    def _of_index(cls, index: Path) -> TensorFiles:
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"{index} has no weight_map: it is not an index of shards. Download it again")
        # by their text, because a damaged index may hold lists
        for name in {str(name): name for name in shards.values()}.values():
            path = index.parent / str(name)
            if Path(str(name)).name != name or "\0" in name or not path.is_file():
                raise CheckpointError(
                    f"{index.name} names the shard {name!r}, which is not in {index.parent}: download it too"
                )
            with opened(path):
                pass
        return cls({tensor: index.parent / name for tensor, name in shards.items()})


@contextmanager
def opened(path: Path) -> Any:
    """Open a safetensors file; raise CheckpointError if it is missing or damaged."""
    safetensors = load("safetensors", "hf")
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    size = path.stat().st_size
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({error}; it has {size:,} bytes): it is truncated, corrupt or "
            "of another format. Download it again"
        ) from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise CheckpointError if the file is damaged or holds anything else."""
    try:
        value = parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): it is truncated or corrupt. Download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object of settings. Download it again")
    return value


def parsed(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none, or nested too deeply for any settings."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise ValueError(f"nested more than {DEEPEST} deep")
    return value


def of_adapter(folder: Path) -> str:
    """Return the message that a folder holds an adapter and no model; empty if it holds none."""
    if not (folder / "adapter_config.json").is_file():
        return ""
    base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
    name = f"its base model {base}" if isinstance(base, str) and base else "its base model"
    return f"{folder} holds an adapter, not a model: merge it into {name} (merge_and_unload in peft) and save that"


def _no_weights(folder: Path) -> str:
    if message := of_adapter(folder):
        return message
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        return f"{folder} holds its weights as {pickled[0]}. {PICKLE_REMEDY}"
    names = sorted(path.name for path in folder.iterdir())
    return f"{folder} holds no model.safetensors and no model.safetensors.index.json; it holds {_some(names)}"


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:6]) or "nothing"
    return f"{listed} and {len(names) - 6} more" if len(names) > 6 else listed


@contextmanager
def explained(problem: str, remedy: str = "") -> Iterator[None]:
    """Turn any error of a library into a CheckpointError: the problem, its cause and the remedy."""
    try:
        yield
    except ImportError:
        # A missing library is not a fault of the file.
        raise
    except Exception as error:
        cause = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{problem} ({type(error).__name__}: {cause}){remedy}") from error
