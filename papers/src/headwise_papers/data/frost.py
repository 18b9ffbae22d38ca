"""The photographs of frost for the frost corruption (Hendrycks & Dietterich 2019, arXiv 1903.12261)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from headwise_papers.data.archive import Package, Source
from headwise_papers.data.pictures import read_picture

FILES: dict[str, str | None] = {
    "frost1.png": "6ead634ace1f366d77e87078b465863c",
    "frost2.png": "98f0d2b1d74a048d3bc9c7ecfd886939",
    "frost3.png": "b3ed8eb147824261888e730f916c0d8b",
    "frost4.jpg": "d70b9d6aa0b1fe7bd8133b113787e078",
    "frost5.jpg": "50984ae2c871b7df2c28f1d71ca460a0",
    "frost6.jpg": "bd01b8fc7c34a4ff3265c6fb476cff7b",
}
PLACE = "https://raw.githubusercontent.com/hendrycks/robustness/master/ImageNet-C/create_c"
SOURCE = Source(
    folder="cifar_c_frost",
    megabytes=2,
    files=FILES,
    packages=tuple(
        Package(addresses=(f"{PLACE}/{name}",), checksum=md5, members={name: ""}) for name, md5 in FILES.items()
    ),
)


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download missing files, and check every file's MD5."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the files of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None) -> list[np.ndarray]:
    """Return the six photographs as (H, W, 3) uint8 in red, green, blue, without transparency."""
    return [read_picture(path) for path in SOURCE.paths(folder)]
