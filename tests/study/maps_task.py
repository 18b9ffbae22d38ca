"""The tiny task, which keeps its maps."""

from typing import ClassVar

from tiny_task import Tiny

from headwise.study import Task


class Mapped(Task):
    """Classify as the tiny task does, and keep the maps."""

    shows_maps: ClassVar[bool] = True

    epochs: int = 1
    batch_size: int = 8
    head_statistics: tuple[str, ...] = ("stream_cosine", "final_cosine", "token_cosine")

    model = Tiny.model

    def data(self, split):
        return Tiny().data(split)
