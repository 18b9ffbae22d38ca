"""A study on made-up data, at toy size and in this process: what `on_a_gpu.py --dry` runs where no data set is.

python benchmarks/dry_study.py blog-cifar10 --set epochs=1,train_size=64 --out folder
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import headwise_papers
import torch
from headwise_papers.data import cifar, tinyshakespeare, wikitext2
from torch import Tensor

import headwise

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .\n"


def images(source: cifar.CifarSource, split: str, given: Path | None) -> tuple[Tensor, Tensor]:
    """Return images whose class is their brightness."""
    draws = torch.Generator().manual_seed(5 if split == "train" else 1)
    classes = torch.arange(240) % source.classes
    noise = torch.randint(0, 20, (240, 3, 32, 32), generator=draws)
    return (noise + 2 * classes[:, None, None, None]).to(torch.uint8), classes


def text(*_: Any) -> str:
    """Return a text in which each letter is followed by one of two."""
    draws, at, written = random.Random(0), 0, []
    for _ in range(60_000):
        written.append(LETTERS[at])
        at = (at + 1 + draws.randrange(2)) % len(LETTERS)
    return "".join(written)


def replace(original: Any, made_up: Any) -> None:
    """Replace a function that reads data by a made-up one, wherever it was imported."""
    for module in [m for name, m in sys.modules.items() if name.startswith("headwise_papers")]:
        for name, value in vars(module).items():
            if value is original:
                setattr(module, name, made_up)


def pretend() -> None:
    """Read made-up data in every study."""
    for found in pkgutil.walk_packages(headwise_papers.__path__, "headwise_papers."):
        importlib.import_module(found.name)
    modules: list[tuple[ModuleType, Any]] = [(cifar, images), (wikitext2, text), (tinyshakespeare, text)]
    for module, made_up in modules:
        replace(module.read, made_up)
        replace(module.prepare, lambda *_: None)
        replace(module.files, lambda *_: [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--method", default="DropHead(p=0.2)")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    pretend()
    settings, out = options.settings, options.out
    print(headwise.compare(options.study, [options.method], seeds=2, settings=settings, out=out, device="cpu"))


if __name__ == "__main__":
    main()
