"""The attention weights of stories260K (Karpathy 2023, llama2.c), a Llama of 5 layers trained on small stories."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.study import DataSet, StudyError
from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import AGAIN

NAME = "stories260K.bin"
SOURCE = Source(
    folder="stories260K",
    files={NAME: "961b3bc7c4d82d90ca963f02b7e0de5d"},
    packages=(
        Package(
            addresses=("https://huggingface.co/karpathy/tinyllamas/resolve/main/stories260K/stories260K.bin",),
            checksum="961b3bc7c4d82d90ca963f02b7e0de5d",
            members={NAME: ""},
        ),
    ),
)
TOKENS = "tok512.bin"
TOKENIZER = Source(
    folder="stories260K",
    files={TOKENS: "2b4a5ca2ec4199f7a12e1b9a2d6f2d82"},
    packages=(
        Package(
            addresses=("https://huggingface.co/karpathy/tinyllamas/resolve/main/stories260K/tok512.bin",),
            checksum="2b4a5ca2ec4199f7a12e1b9a2d6f2d82",
            members={TOKENS: ""},
        ),
    ),
)
# integers before the weights: width, width of the MLP, layers, heads, groups, vocabulary, length
HEADER = struct.Struct("7i")


@dataclass(frozen=True, eq=False)
class StoryAttention:
    """The weights of one layer in the layout of llama2.c: rotary positions rotate neighbouring rows of queries and
    keys.

    Attributes:
        q: (H, d, C).
        k: (G, d, C), shared by groups of heads.
        v: (G, d, C).
        o: (H, d, C), a row for each input of the output projection.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor


def described() -> DataSet:
    """Return the description of the model with its tokenizer."""
    return DataSet(SOURCE.folder, ((NAME, TOKENS),), megabytes=1.1)


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download the model if it is missing, and check its MD5."""
    SOURCE.prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the file of the data set."""
    return SOURCE.paths(folder)


def read(folder: Path | None) -> list[StoryAttention]:
    """Return the attention layers in order; raise StudyError if the file is not such a model or is incomplete."""
    path = SOURCE.find_folder(folder) / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StudyError(
            f"{path} is missing. Name its folder by --data, or leave --data out to have it downloaded."
        ) from error
    if len(content) < HEADER.size:
        raise StudyError(f"{path} has {len(content)} bytes: it is not a llama2.c model. {AGAIN}")
    width, _, layers, heads, groups, vocabulary, _ = HEADER.unpack_from(content)
    size = width // max(heads, 1)
    sizes = {"q": heads, "k": groups, "v": groups, "o": heads}
    # after the embedding and the norms before attention come all layers' queries, then keys, values and outputs
    start = HEADER.size + 4 * (abs(vocabulary) + layers) * width
    count = layers * width * size * sum(sizes.values())
    if min(width, layers, heads, groups) < 1 or len(content) < start + 4 * count:
        raise StudyError(
            f"{path} has {len(content)} bytes, fewer than its header states: it is not a complete llama2.c model. "
            f"{AGAIN}"
        )
    numbers = torch.frombuffer(bytearray(content[start : start + 4 * count]), dtype=torch.float32)
    parts: dict[str, Tensor] = {}
    for name, number in sizes.items():
        block, numbers = numbers.split(
            [layers * number * size * width, numbers.numel() - layers * number * size * width]
        )
        # the output projection maps the heads' outputs, so that a head's weights are columns
        parts[name] = (
            block.view(layers, width, heads, size).permute(0, 2, 3, 1)
            if name == "o"
            else block.view(layers, number, size, width)
        )
    return [StoryAttention(**{name: block[layer] for name, block in parts.items()}) for layer in range(layers)]
