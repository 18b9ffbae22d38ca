"""Multi30k (Elliott et al. 2016, arXiv 1605.00459): pairs of German and English captions of pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise.study import StudyError
from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import AGAIN, read_lines, refuse_empty, split_name

SPLITS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
FILES: dict[str, str | None] = {
    "train.de": "d3b4bc1671cfb805267f97f16884beba",
    "train.en": "053a34ece7c904dbc8c7361799afbe4c",
    "val.de": "9f139b15d9d11936dea7af2904e57d8c",
    "val.en": "2234730e7925354b766681b029b347ec",
    "test_2016_flickr.de": "cde61d7401b116652ee84099c7858ca3",
    "test_2016_flickr.en": "2022a6c31e2418047a0511333d55ed42",
}
PLACE = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
SOURCE = Source(
    folder="multi30k",
    megabytes=4.3,
    files=FILES,
    # checksums of the packed files are not published, so those of the unpacked files are checked
    packages=tuple(Package(addresses=(f"{PLACE}/{name}.gz",), members={name: ""}) for name in FILES),
)


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download missing files, and check every file's MD5."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the files of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None, split: str) -> list[tuple[str, str]]:
    """Return the pairs of German and English sentences of "train", "validation" or "test" (Flickr 2016).

    Raises StudyError if the two files have different numbers of lines, and for empty sentences.
    """
    stem = SOURCE.find_folder(folder) / split_name(split, SPLITS)
    sides = []
    for language in ("de", "en"):
        path = stem.with_name(f"{stem.name}.{language}")
        lines = [line.strip() for line in read_lines(path)]
        refuse_empty(path, lines, "sentences")
        sides.append(lines)
    german, english = sides
    if len(german) != len(english):
        raise StudyError(
            f"{stem}.de has {len(german)} lines, {stem.name}.en {len(english)}: they form no pairs. {AGAIN}"
        )
    return list(zip(german, english, strict=True))
