"""Batch: what a model takes and what its output is judged against."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Hold the inputs and targets of one batch.

    A model gets a tensor as its one argument, a tuple as its arguments in order, a dict as its keywords; a tuple that holds
    one dict hands over the dict itself.
    """

    inputs: Any
    targets: Any = None
