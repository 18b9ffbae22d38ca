"""WikiText-2 (Merity et al. 2016, arXiv 1609.07843): articles of Wikipedia as words, with <unk> for rare words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import read_text, split_name

SOURCE = Source(
    folder="wikitext-2",
    megabytes=13,
    files={
        "train.txt": "34a77ebe59551b3a3b3d8c0a2797c976",
        "valid.txt": "d756d22ab2310e7e60c094bea5c5a8eb",
        "test.txt": "781c9418ab9414bd09e4aad825aae752",
    },
    packages=(
        Package(
            addresses=(
                "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
                "https://wikitext.smerity.com/wikitext-2-v1.zip",
            ),
            checksum="542ccefacc6c27f945fb54453812b3cd",
            members={
                "train.txt": "wikitext-2/wiki.train.tokens",
                "valid.txt": "wikitext-2/wiki.valid.tokens",
                "test.txt": "wikitext-2/wiki.test.tokens",
            },
        ),
    ),
)
SPLITS = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download missing files, and check every file's MD5."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the files of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None, split: str) -> str:
    """Return "train", "validation" or "test" as one text: words separated by spaces, one line per paragraph."""
    return read_text(SOURCE.find_folder(folder) / split_name(split, SPLITS))
