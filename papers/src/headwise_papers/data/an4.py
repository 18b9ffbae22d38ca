"""AN4 (CMU 1991): spelled addresses, names and numbers, as 13 mel cepstra at 100 frames per second."""

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
    by_hand=f"Its publisher has only sound: pass --data FOLDER with an4/{NAME}; how it was made is described in "
    "docs/data.md.",
)


@dataclass(frozen=True)
class Utterance:
    """One utterance: its name, features (T, 13) in fp32 at 100 frames per second, and words in upper case."""

    name: str
    features: Tensor
    transcript: str


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Check the MD5 of the file of features; raise StudyError with its origin if it is missing."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the file of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None, split: str) -> list[Utterance]:
    """Return the utterances of "train" or "test"; there is no validation split.

    Raises StudyError for an invalid or inconsistent file, and for utterances without words or frames.
    """
    if split not in ("train", "test"):
        raise ValueError(f"There is no split {split!r}; the splits are train, test.")
    (path,) = files(folder)
    return [utterance for split_of_utterance, utterance in _read(path) if split_of_utterance == split]


@functools.lru_cache(maxsize=1)
def _read(path: Path) -> list[tuple[str, Utterance]]:
    """Return every utterance with its split."""
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
        raise StudyError(f"{path}: some features are not finite. {AGAIN}")
    parts = torch.from_numpy(arrays["features"].astype(np.float32)).split(lengths)
    utterances = [
        (split, Utterance(name, part, transcript))
        for part, name, transcript, split in zip(parts, *columns, strict=True)
    ]
    bad = [
        one.name
        for split, one in utterances
        if not one.transcript.strip() or not len(one.features) or split not in ("train", "test")
    ]
    if bad:
        raise StudyError(
            f"{path}: {len(bad)} utterances have an empty transcript, no frames or no split: {', '.join(bad[:5])}. "
            f"{AGAIN}"
        )
    return utterances


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        # the file is opened here so that it is closed even if numpy refuses it
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
        raise StudyError(f"{path} is not a valid file of features: {error}. {AGAIN}") from error
