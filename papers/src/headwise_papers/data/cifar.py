"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the official binary files or from existing Python batches."""

from __future__ import annotations

import functools
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.study import DataSet, StudyError
from headwise_papers.data import archive

PIXELS = 3 * 32 * 32
# errors that pickletools raises for bytes that are not a pickle
NO_PICKLE = (ValueError, KeyError, IndexError, UnicodeDecodeError)


@dataclass(frozen=True)
class Form:
    """One published form of a data set: its folder, its files with their MD5, and the layout of a file."""

    folder: str
    train: dict[str, str]
    test: dict[str, str]
    # number of label bytes before an image's pixels, the last of which is its class; 0: a Python batch
    labels: int
    # the key of the classes in a Python batch
    key: str = ""

    @property
    def files(self) -> dict[str, str]:
        """Return all files and their MD5."""
        return {**self.train, **self.test}


@dataclass(frozen=True)
class CifarSource:
    """The address of a data set, its number of classes, and the two forms in which it can be read.

    `binary` is downloaded. `python` is read if a folder already contains it; the images and their order are the same.
    """

    address: str
    archive_md5: str
    classes: int
    binary: Form
    python: Form

    def origin(self, form: Form) -> archive.Source:
        """Return the source of the files of a form."""
        members = {name: f"{self.binary.folder}/{name}" for name in self.binary.files}
        package = archive.Package((self.address,), members, self.archive_md5)
        by_hand = f"Name another folder, where {self.binary.folder} is downloaded, or add the files."
        return archive.Source(form.folder, {**form.files}, (package,) if form is self.binary else (), by_hand)

    def held(self, given: Path | None) -> tuple[Form, Path]:
        """Return the form in the user's folder, or the binary one if it contains neither, and the form's folder."""
        places = [(form, self.origin(form).find_folder(given)) for form in (self.binary, self.python)]
        return next(((form, at) for form, at in places if any((at / name).is_file() for name in form.files)), places[0])


SOURCES = {
    "cifar10": CifarSource(
        address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
        classes=10,
        binary=Form(
            folder="cifar-10-batches-bin",
            labels=1,
            train={
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            },
            test={"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
        ),
        python=Form(
            folder="cifar-10-batches-py",
            labels=0,
            key="labels",
            train={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            },
            test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        ),
    ),
    "cifar100": CifarSource(
        address="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
        classes=100,
        # the coarse class, of twenty, precedes the class of a hundred
        binary=Form(
            folder="cifar-100-binary",
            labels=2,
            train={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
            test={"test.bin": "4499cfba6c016c1be1438163640a0898"},
        ),
        python=Form(
            folder="cifar-100-python",
            labels=0,
            key="fine_labels",
            train={"train": "16019d7e3df5f24257cddd939b257f8d"},
            test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        ),
    ),
}


def described(source: CifarSource) -> DataSet:
    """Return the description of the data set."""
    binary, python = source.binary, source.python
    forms = tuple(tuple(f"{form.folder}/{name}" for name in form.files) for form in (binary, python))
    bare = tuple(tuple(form.files) for form in (binary, python))
    return DataSet(binary.folder, forms + bare, megabytes=184)


def prepare(source: CifarSource, given: Path | None, tell: Callable[[str], None]) -> None:
    """Download missing files, and check every file against the official MD5."""
    form, folder = source.held(given)
    source.origin(form).prepare(folder, tell)


def files(source: CifarSource, given: Path | None) -> list[Path]:
    """Return the files of the form in the user's folder."""
    form, folder = source.held(given)
    return [folder / name for name in form.files]


def read(source: CifarSource, split: str, given: Path | None) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, 32, 32) uint8 and classes (N,) int64 of "train" or "test".

    Raises StudyError naming an invalid file.
    """
    form, folder = source.held(given)
    names = form.train if split == "train" else form.test
    return _read(tuple(folder / name for name in names), form.labels, form.key, source.classes)


@functools.lru_cache(maxsize=4)
def _read(paths: tuple[Path, ...], labels: int, key: str, classes: int) -> tuple[Tensor, Tensor]:
    parts = []
    for path in paths:
        try:
            content = path.read_bytes()
            images, numbers = binary_file(content, labels) if labels else python_batch(content, key)
            if int(numbers.max()) >= classes:
                raise ValueError(f"it holds the class {int(numbers.max())}, of {classes} counted from 0")
        except ValueError as error:
            raise StudyError(f"{path} is not a CIFAR file: {error}. Delete it and start again.") from error
        parts.append((images, numbers))
    images, numbers = (torch.cat(tensors) for tensors in zip(*parts))
    return images, numbers


def binary_file(content: bytes, labels: int) -> tuple[Tensor, Tensor]:
    """Return the images and classes of a binary file, with `labels` bytes before each image's pixels by colour and
    row."""
    if not content or len(content) % (labels + PIXELS):
        raise ValueError(f"its {len(content):,} bytes are not a whole number of images of {labels + PIXELS:,} bytes")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, labels + PIXELS)
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].long()


def python_batch(content: bytes, key: str) -> tuple[Tensor, Tensor]:
    """Return the images and classes of an official Python batch from its opcodes, without unpickling.

    The pixels are its longest string, the classes the numbers of the list that follows the string `key`.
    """
    pixels: bytes | str = b""
    classes: list[int] = []
    word: bytes | str = ""
    try:
        for operation, value, _ in pickletools.genops(content):
            if isinstance(value, bytes | str):
                word = value
                if len(word) > len(pixels):
                    pixels = word
            elif isinstance(value, int) and word in (key, key.encode()) and operation.name.startswith("BININT"):
                classes.append(value)
    except NO_PICKLE as error:
        raise ValueError(f"it is not a Python batch ({error})") from error
    raw = pixels if isinstance(pixels, bytes) else pixels.encode("latin-1")
    if not classes or len(raw) != len(classes) * PIXELS:
        raise ValueError(
            f"it holds {len(classes):,} classes and {len(raw):,} bytes of pixels, {PIXELS:,} for each are wanted"
        )
    images = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 3, 32, 32)
    return images, torch.tensor(classes)
