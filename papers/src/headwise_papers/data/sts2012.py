"""SemEval STS 2012 (Agirre et al. 2012): pairs of sentences with their similarity from 0 to 5, without its MSRvid part.

The text of the video part needs an agreement with its publisher and is not in the public copy, so figures over these
parts are not comparable with the published ones over five.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import read_number, read_rows, refuse_empty

FILES: dict[str, str | None] = {
    "MSRpar.train.tsv": "8639f36c2b928b248f2c604fc5619dc2",
    "SMTeuroparl.train.tsv": "4a107243e8bd2c9830de54c9f0aa34a6",
    "MSRpar.test.tsv": "b0b41e2ea21b9e256add527f006a4108",
    "OnWN.test.tsv": "5feade4c463e313e7fcce3d1c51a78d9",
    "SMTeuroparl.test.tsv": "43fbc6c2c242704d175c601240b4df7f",
    "SMTnews.test.tsv": "db38fc8e4b6f739993ef9e0b07e99f0d",
}
# the organisers' archive has sentences and scores in separate files; this copy has them in one file
PLACE = "https://raw.githubusercontent.com/brmson/dataset-sts/master/data/sts/semeval-sts/2012"
SOURCE = Source(
    folder="sts2012",
    megabytes=0.8,
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


def read(folder: Path | None, split: str) -> tuple[list[str], list[str], list[float]]:
    """Return first sentences, second sentences and scores from 0 to 5 of "train" or "test", part after part.

    Raises StudyError naming the line of a row with another number of columns, an invalid score or an empty sentence.
    """
    paths = [path for path in SOURCE.paths(folder) if path.name.endswith(f".{split}.tsv")]
    if not paths:
        raise ValueError(f"There is no split {split!r}; the splits are train, test.")
    first: list[str] = []
    second: list[str] = []
    scores: list[float] = []
    for path in paths:
        rows = read_rows(path, 3)
        for column in (1, 2):
            refuse_empty(path, [row[column] for row in rows], "sentences")
        first += [row[1] for row in rows]
        second += [row[2] for row in rows]
        scores += [read_number(row[0], 0, 5, path, line) for line, row in enumerate(rows, start=1)]
    return first, second, scores
