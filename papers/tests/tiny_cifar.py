"""CIFAR-10 and the photographs of frost in tiny: files that the loaders take for the official ones."""

import hashlib
import io
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
from headwise_papers.data import cifar, frost
from PIL import Image


def put(folder: Path, monkeypatch, *, train: int, test: int) -> Path:
    """Write so many images of each split into `folder`, their brightness told by their class, and six gray photographs."""
    small = cifar.SOURCES["cifar10"]
    names = {"train": "data_batch_1", "test": "test_batch"}
    sums = {}
    (folder / small.folder).mkdir(parents=True)
    for seed, (split, name) in enumerate(names.items()):
        draws, count = np.random.default_rng(seed), {"train": train, "test": test}[split]
        classes = draws.integers(10, size=count)
        pixels = np.clip(25 * classes[:, None] + draws.integers(0, 40, (count, 3072)), 0, 255).astype(np.uint8)
        content = pickle.dumps({b"data": pixels, b"labels": classes.tolist()})
        (folder / small.folder / name).write_bytes(content)
        sums[split] = {name: hashlib.md5(content).hexdigest()}
    monkeypatch.setitem(cifar.SOURCES, "cifar10", replace(small, train=sums["train"], test=sums["test"]))
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
