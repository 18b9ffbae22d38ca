"""AN4 (CMU 1991): people spelling out addresses, names and numbers, as 13 mel cepstra at 100 frames a second."""

from __future__ import annotations

import functools
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwise.study import StudyError
from headwise_papers.data.archive import Source
from headwise_papers.data.text_files import AGAIN

NAME = "an4_mfcc_f16.npz"
CEPSTRA = 13
ARRAYS = ("features", "lengths", "names", "transcripts", "split")
SOURCE = Source(
    folder="an4",
    megabytes=7,
    files={NAME: "5c2f1a2d0958a4262686321525c1db73"},
    by_hand=f"Its publisher has sound alone: give --data FOLDER with an4/{NAME}; its making is described in "
    "docs/data.md.",
)


@dataclass(frozen=True)
class Utterance:
    """Hold one utterance: its name, its features (T, 13) in fp32 at 100 frames a second, and its words in capitals."""

    name: str
    features: Tensor
    transcript: str


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Check the MD5 of the file of features; raise StudyError with where it comes from when it is absent."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Name the file."""
    return SOURCE.paths(folder)


def read(folder: Path | None, split: str) -> list[Utterance]:
    """Read "train" or "test"; there is no validation split.

    Raises StudyError for a file that is no such archive, lacks an array, or does not fit itself, and that counts and
    names utterances without words or without frames.
    """
    if split not in ("train", "test"):
        raise ValueError(f"There is no split {split!r}; there are train, test.")
    (path,) = files(folder)
    return [utterance for own, utterance in _read(path) if own == split]


@functools.lru_cache(maxsize=1)
def _read(path: Path) -> list[tuple[str, Utterance]]:
    """Read every utterance with its split."""
    arrays = _arrays(path)
    lengths = arrays["lengths"].tolist()
    columns = [arrays[name].tolist() for name in ("names", "transcripts", "split")]
    shape = arrays["features"].shape
    if shape != (sum(lengths), CEPSTRA) or {len(column) for column in columns} != {len(lengths)}:
        raise StudyError(
            f"{path}: features {shape} do not fit {len(lengths)} lengths of {sum(lengths)} frames in all, of {CEPSTRA} "
            f"cepstra each. {AGAIN}"
        )
    if not np.isfinite(arrays["features"]).all():
        raise StudyError(f"{path}: there are features that are not finite. {AGAIN}")
    parts = torch.from_numpy(arrays["features"].astype(np.float32)).split(lengths)
    found = [(own, Utterance(name, part, said)) for part, name, said, own in zip(parts, *columns, strict=True)]
    bad = [
        one.name
        for own, one in found
        if not one.transcript.strip() or not len(one.features) or own not in ("train", "test")
    ]
    if bad:
        raise StudyError(
            f"{path}: {len(bad)} utterances have an empty transcript, no frames or no split: {', '.join(bad[:5])}. "
            f"{AGAIN}"
        )
    return found


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        # a file of our own, which is closed though numpy refuses it
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in ARRAYS}
    except FileNotFoundError as error:
        raise StudyError(f"{path} is missing. {SOURCE.by_hand}") from error
    except (
        ValueError,
        KeyError,
        EOFError,
        OSError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise StudyError(f"{path} is no such file of features: {error}. {AGAIN}") from error
