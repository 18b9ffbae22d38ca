"""SST-2 (Socher et al. 2013, as in GLUE, arXiv 1804.07461): sentences of film reviews, negative or positive.

GLUE does not publish the labels of its test sentences, but its archive includes the treebank, from which the labelled
test file is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise.study import StudyError
from headwise_papers.data.archive import Package, Read, Source
from headwise_papers.data.text_files import AGAIN, read_rows, refuse_empty, split_name

HEADER = ("sentence", "label")
SPLITS = {"train": "train.tsv", "validation": "dev.tsv", "test": "test-labeled.tsv"}


def label_test(read: Read) -> bytes:
    """Return the labelled test file: each test sentence of GLUE with the treebank's label of the same phrase."""
    values = [line.split("|")[1] for line in _lines(read("SST-2/original/sentiment_labels.txt"))[1:]]
    phrases = {}
    for line in _lines(read("SST-2/original/dictionary.txt")):
        phrase, number = line.rsplit("|", 1)
        # GLUE is in lower case and without backslashes
        phrases[phrase.lower().replace("\\", "")] = int(float(values[int(number)]) > 0.5)
    rows = ["\t".join(HEADER)]
    for line in _lines(read("SST-2/test.tsv"))[1:]:
        sentence = line.split("\t")[1]
        rows.append(f"{sentence}\t{phrases[sentence]}")
    return "".join(f"{row}\r\n" for row in rows).encode()


def _lines(content: bytes) -> list[str]:
    return content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")


SOURCE = Source(
    folder="sst2",
    megabytes=4,
    files={
        "train.tsv": "da409a0a939379ed32a470bc0f7fe99a",
        "dev.tsv": "268856b487b2a31a28c0a93daaff7288",
        "test-labeled.tsv": "33463d09bb4bacbdaf886f50edb2b437",
    },
    packages=(
        Package(
            addresses=("https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",),
            checksum="9f81648d4199384278b86e315dac217c",
            members={"train.tsv": "SST-2/train.tsv", "dev.tsv": "SST-2/dev.tsv"},
            made={"test-labeled.tsv": label_test},
        ),
    ),
)


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download missing files, and check every file's MD5."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the files of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None, split: str) -> tuple[list[str], list[int]]:
    """Return the sentences of a split in lower case, and their labels, 0 for negative or 1 for positive.

    Raises StudyError naming the line of a row with another number of columns, an invalid label or an empty sentence.
    """
    path = SOURCE.find_folder(folder) / split_name(split, SPLITS)
    rows = read_rows(path, 2, header=HEADER)
    for number, (_, label) in enumerate(rows, start=2):
        if label not in ("0", "1"):
            raise StudyError(f"{path}, line {number}: label {label!r} instead of 0 or 1. {AGAIN}")
    sentences = [sentence.strip() for sentence, _ in rows]
    refuse_empty(path, sentences, "sentences")
    return sentences, [int(label) for _, label in rows]
