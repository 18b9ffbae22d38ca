"""CIFAR-10 and the photographs of frost in tiny: files that the loaders take for the official ones."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from headwise_papers.data import cifar, frost
from PIL import Image


def write_binary(path: Path, pixels: np.ndarray, classes, coarse: bytes = b"") -> bytes:
    """Write an official binary file: of each image `coarse`, its class, and its 3072 bytes; give what was written."""
    rows = (
        coarse + bytes([label]) + row.tobytes() for label, row in zip(classes, pixels.astype(np.uint8), strict=True)
    )
    path.write_bytes(content := b"".join(rows))
    return content


def put(folder: Path, monkeypatch, *, train: int, test: int) -> Path:
    """Write so many images of each split into `folder`, their brightness told by their class, and six gray
    photographs."""
    small = cifar.SOURCES["cifar10"]
    names = {"train": "data_batch_1.bin", "test": "test_batch.bin"}
    sums = {}
    (folder / small.binary.folder).mkdir(parents=True)
    for seed, (split, name) in enumerate(names.items()):
        draws, count = np.random.default_rng(seed), {"train": train, "test": test}[split]
        classes = draws.integers(10, size=count)
        pixels = np.clip(25 * classes[:, None] + draws.integers(0, 40, (count, 3072)), 0, 255).astype(np.uint8)
        content = write_binary(folder / small.binary.folder / name, pixels, classes.tolist())
        sums[split] = {name: hashlib.md5(content).hexdigest()}
    form = replace(small.binary, train=sums["train"], test=sums["test"])
    monkeypatch.setitem(cifar.SOURCES, "cifar10", replace(small, binary=form))
    (folder / frost.SOURCE.folder).mkdir()
    found = {}
    for number, name in enumerate(frost.FILES):
        stream = io.BytesIO()
        kind = "JPEG" if name.endswith("jpg") else "PNG"
        Image.new("RGB", (200, 180), (40 * number,) * 3).save(stream, kind)
        (folder / frost.SOURCE.folder / name).write_bytes(stream.getvalue())
        found[name] = hashlib.md5(stream.getvalue()).hexdigest()
    monkeypatch.setattr(frost, "SOURCE", replace(frost.SOURCE, files=found))
    return folder
