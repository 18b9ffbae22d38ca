"""STS-B (Cer et al. 2017, arXiv 1708.00055): pairs of sentences with their similarity from 0 to 5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import read_number, read_rows, refuse_empty, split_name

SPLITS = {"train": "sts-train.csv", "validation": "sts-dev.csv", "test": "sts-test.csv"}
SOURCE = Source(
    folder="stsb",
    megabytes=1.4,
    files={
        "sts-train.csv": "e0a88b5f5df2159a499edb6183bd6722",
        "sts-dev.csv": "d8861ba32277033ed6b1315883894f78",
        "sts-test.csv": "f8c608a4dcfeff4ea11912ea72aacd6e",
    },
    packages=(
        Package(
            addresses=("http://ixa2.si.ehu.eus/stswiki/images/4/48/Stsbenchmark.tar.gz",),
            checksum="4eb0065aba063ef77873d3a9c8088811",
            members={name: f"stsbenchmark/{name}" for name in SPLITS.values()},
        ),
    ),
)
# genre, file, year, number, score, sentence, sentence; then attributions required by a licence
SCORE, FIRST, SECOND, COLUMNS = 4, 5, 6, 7


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download missing files, and check every file's MD5."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the files of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None, split: str) -> tuple[list[str], list[str], list[float]]:
    """Return first sentences, second sentences and scores from 0 to 5 of a split.

    Raises StudyError naming the line of a row with another number of columns, an invalid score or an empty sentence.
    """
    path = SOURCE.find_folder(folder) / split_name(split, SPLITS)
    rows = read_rows(path, COLUMNS, more=True)
    first, second = [row[FIRST] for row in rows], [row[SECOND] for row in rows]
    for sentences in (first, second):
        refuse_empty(path, sentences, "sentences")
    return first, second, [read_number(row[SCORE], 0, 5, path, line) for line, row in enumerate(rows, start=1)]
