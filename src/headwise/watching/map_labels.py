"""Labels of heat maps: layers and heads beside the squares, and a scale with its ends, drawn without any library."""

from __future__ import annotations

import torch
from torch import Tensor

# three columns and five rows a sign, each row a digit of 0 to 7 whose bits are the columns
SIGNS = {
    "0": "75557",
    "1": "26227",
    "2": "71747",
    "3": "71717",
    "4": "55711",
    "5": "74717",
    "6": "74757",
    "7": "71122",
    "8": "75757",
    "9": "75717",
    ".": "00002",
    "-": "00700",
    "+": "02720",
    " ": "00000",
    "a": "03553",
    "d": "11353",
    "e": "07747",
    "h": "44655",
    "l": "22223",
    "r": "06444",
    "y": "05716",
}
# pixels for a pixel of a sign, between parts, of the bar of the scale, and of the least height
SIZE, GAP, BAR, LEAST = 2, 4, 10, 64
WHITE, BLACK = 255, 40


def lettered(text: str) -> Tensor:
    """Return a text as (height, width) bool."""
    columns = [torch.tensor([[int(row) >> (2 - at) & 1 for at in range(3)] for row in SIGNS[sign]]) for sign in text]
    spaced = [torch.nn.functional.pad(one, (0, 1)) for one in columns]
    return torch.cat(spaced, 1)[:, :-1].bool().repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)


def labelled(picture: Tensor, rows: list[str], square: int, gap: int, ends: tuple[str, str], scale: Tensor) -> Tensor:
    """Return a picture of squares with its axes named, and its scale beside it.

    Args:
        picture: squares (height, width, 3), a layer a row, a head a column, the first layer on top.
        rows: what stands beside each row, its depth.
        square: pixels of a square.
        gap: pixels between two.
        ends: the lowest and the highest value of the scale, as texts.
        scale: colours (n, 3) from the highest to the lowest value.
    """
    step, (height, width) = square + gap, picture.shape[:2]
    beside, title, below = [lettered(row) for row in rows], lettered("layer"), lettered("head")
    line = title.shape[0]
    left = max(title.shape[1], *(one.shape[1] for one in beside)) + GAP
    numbers = [lettered(end) for end in ends]
    tall = max(height, LEAST)
    wide = left + max(width, below.shape[1]) + 3 * GAP + BAR + max(one.shape[1] for one in numbers)
    canvas = torch.full((line + GAP + tall + 2 * (GAP + line), wide, 3), WHITE, dtype=torch.uint8)
    top = line + GAP
    canvas[top : top + height, left : left + width] = picture
    _write(canvas, title, 0, 0)
    for at, one in enumerate(beside):
        _write(canvas, one, top + at * step + (square - line) // 2, left - GAP - one.shape[1])
    # a number is wider than a square where there are a hundred heads
    every = 1 if width <= 100 * step else 5
    for head in range(0, (width + gap) // step, every):
        one = lettered(str(head))
        _write(canvas, one, top + height + GAP, left + head * step + max(0, (square - one.shape[1]) // 2))
    _write(canvas, below, top + height + 2 * GAP + line, left)
    bar = left + max(width, below.shape[1]) + 2 * GAP
    index = (torch.arange(tall) * len(scale)).div(tall, rounding_mode="floor")
    canvas[top : top + tall, bar : bar + BAR] = scale[index][:, None]
    _write(canvas, numbers[1], top, bar + BAR + GAP)
    _write(canvas, numbers[0], top + tall - line, bar + BAR + GAP)
    return canvas


def _write(canvas: Tensor, signs: Tensor, top: int, left: int) -> None:
    part = canvas[top : top + signs.shape[0], left : left + signs.shape[1]]
    part[signs[: part.shape[0], : part.shape[1]]] = BLACK
