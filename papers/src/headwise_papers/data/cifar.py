"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from the official Python batches, read without running a pickle."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.study import StudyError
from headwise_papers.data import archive


@dataclass(frozen=True)
class Source:
    """Hold where a data set comes from and the official MD5 of its archive and files."""

    address: str
    archive_md5: str
    folder: str
    label: bytes
    classes: int
    train: dict[str, str]
    test: dict[str, str]

    @property
    def files(self) -> dict[str, str]:
        """Give all files and their MD5."""
        return {**self.train, **self.test}

    @property
    def origin(self) -> archive.Source:
        """Give where the files come from and where they lie."""
        members = {name: f"{self.folder}/{name}" for name in self.files}
        package = archive.Package((self.address,), members, self.archive_md5)
        return archive.Source(self.folder, {**self.files}, (package,))


SOURCES = {
    "cifar10": Source(
        address="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        archive_md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        label=b"labels",
        classes=10,
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    ),
    "cifar100": Source(
        address="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        label=b"fine_labels",
        classes=100,
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    ),
}


def prepare(source: Source, given: Path | None, tell: Callable[[str], None]) -> None:
    """Download what is missing and check every file against the official MD5, naming each corrupt one."""
    source.origin.prepare(given, tell)


def find_folder(source: Source, given: Path | None) -> Path:
    """Give the folder of the batches: the one given, or the one inside it; without one, the user's cache."""
    return source.origin.find_folder(given)


@functools.lru_cache(maxsize=4)
def read_images(paths: tuple[Path, ...], label: bytes) -> tuple[Tensor, Tensor]:
    """Read batches into images (N, 3, 32, 32) uint8 and classes (N,) int64."""
    images, classes = [], []
    for path in paths:
        try:
            batch = read_batch(path.read_bytes())
            pixels = batch[b"data"].raw
            images.append(torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 3, 32, 32))
            classes.append(torch.tensor(batch[label], dtype=torch.int64))
        except (
            pickle.UnpicklingError,
            KeyError,
            AttributeError,
            TypeError,
            ValueError,
            EOFError,
            RuntimeError,
        ) as error:
            raise StudyError(f"{path} is no CIFAR batch: {error}. Delete it and start again.") from error
    return torch.cat(images), torch.cat(classes)


def read_batch(content: bytes) -> dict[bytes, Any]:
    """Read one batch: a dictionary of plain values and arrays. Nothing in the file is ever called.

    Raises pickle.UnpicklingError for a file that asks for anything but a numpy array of bytes.
    """
    return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()


class _Array:
    """Stand in for a numpy array: keep its bytes, run nothing of numpy."""

    raw: bytes

    def __setstate__(self, state: tuple) -> None:
        _version, _shape, kind, _fortran, raw = state
        if not isinstance(kind, _Kind) or kind.name not in (b"u1", "u1") or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of bytes")
        self.raw = raw


class _Kind:
    """Stand in for a numpy dtype: keep its name."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: tuple) -> None:
        """Take what numpy adds; bytes have no order."""


def _new_array(*_: object) -> _Array:
    return _Array()


class _PlainUnpickler(pickle.Unpickler):
    """Build plain values and stand-ins; refuse every other name a file could ask for."""

    ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _new_array,
        ("numpy._core.multiarray", "_reconstruct"): _new_array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Kind,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs; it was not run")
        return self.ALLOWED[module, name]
