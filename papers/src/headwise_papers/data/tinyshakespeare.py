"""Tiny Shakespeare (Karpathy 2015): 40,000 lines of plays in one text of a million characters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import read_text

NAME = "input.txt"
SOURCE = Source(
    folder="tinyshakespeare",
    megabytes=1.1,
    files={NAME: "6fb458f1232090904fb40fe944165e91"},
    packages=(
        Package(
            addresses=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
            checksum="6fb458f1232090904fb40fe944165e91",
            members={NAME: ""},
        ),
    ),
)


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download the text if it is missing, and check its MD5."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the file of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None) -> str:
    """Return the whole text, which has no predefined splits."""
    return read_text(SOURCE.find_folder(folder) / NAME)
