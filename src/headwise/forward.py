"""Forward: what belongs to one forward pass. Threads that share a model have one each."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor


class Forward(threading.local):
    """What belongs to one forward of the whole model.

    Attributes:
        samples: the batch size of the model's first tensor, or None where it takes none.
        running: whether the model's own forward runs now, and not a part of it alone.
        carried: by stack, the values of its first self attention.
    """

    def __init__(self) -> None:
        self.samples: int | None = None
        self.running = False
        self.carried: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return Forward()


class Entered(threading.local):
    """What entered one site, until its attention is called: (B, T, C) or None."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Entered:
        return Entered()
