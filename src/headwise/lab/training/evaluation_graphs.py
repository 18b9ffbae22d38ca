"""Evaluations as CUDA graphs: the forward and the count of a batch are captured once and replayed, as steps are.

Each evaluation has graphs of its own, one for each shape of its batches; a last batch of another shape is run kernel by
kernel until it has come often enough. Batches are made outside the graphs, and read the parameters where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headwise.attend import FittedLayer
from headwise.lab.experiments.evaluation import Batch, Rows, Sums
from headwise.lab.training.step_graphs import Replay, StepGraphs


class EvaluationGraphs:
    """The captured evaluations of one phase.

    Args:
        device: of the training.
        fitted: the layers that the methods act on.
        record: runs a function once, and returns its result and a function that repeats its kernels.
    """

    def __init__(
        self,
        device: torch.device,
        fitted: Sequence[FittedLayer] = (),
        record: Callable[[Callable[[], Any]], tuple[Any, Replay]] | None = None,
    ) -> None:
        self.device, self.fitted, self.record = device, fitted, record
        self.graphs: dict[str, StepGraphs] = {}

    def sums(self, name: str, count: Callable[[Batch], Sums], batch: Batch) -> Sums:
        """Return `count(batch)` of the evaluation `name`, captured if it can be; the tensors are the caller's own."""
        if name not in self.graphs:
            self.graphs[name] = StepGraphs(None, self.device, self.fitted, self.record)
        # the next replay writes over what this one gives
        sums = self.graphs[name].step(lambda batches, _: count(batches[0]), [batch], [])
        return {
            kind: Rows(value.tensor.clone()) if isinstance(value, Rows) else value.clone()
            for kind, value in sums.items()
        }

    def told(self) -> str:
        """Return how the evaluations were made, for the report; those alike are told together."""
        ways: dict[str, list[str]] = {}
        for name, graphs in self.graphs.items():
            ways.setdefault(graphs.told(), []).append(name)
        return "; ".join(f"{', '.join(names)}: {way}" for way, names in ways.items())
