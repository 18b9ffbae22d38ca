"""The splits of a run: asked for when they are needed, moved to the device once, kept while the run lasts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from headwise.comparing.evaluation import Evaluation
from headwise.comparing.run.examples import Examples, move
from headwise.comparing.run.splits import held_out_examples
from headwise.comparing.task import Task


@dataclass(frozen=True)
class Held:
    """Hold the training and validation examples of a phase, and give the others on demand."""

    task: Task
    device: torch.device
    train: Examples
    validation: Examples | None
    evaluations: list[Evaluation]
    final: bool
    others: dict[str, Examples] = field(default_factory=dict)

    def examples(self, evaluation: Evaluation) -> Examples | None:
        """Give the examples of an evaluation; None for those that a trial may not see, or that do not exist."""
        if evaluation.split == "train":
            return self.train
        if evaluation.split == "validation":
            return self.validation
        return self._other(evaluation.split) if self.final else None

    def judged(self) -> Examples:
        """Give the examples that the deciding evaluation is made on."""
        deciding = next(e for e in self.evaluations if e.name == self.task.decides_on)
        found = self.examples(deciding)
        return self.train if found is None else found

    def only(self, evaluations: list[Evaluation]) -> Held:
        """Give the same splits with fewer evaluations."""
        return replace(self, evaluations=evaluations)

    def _other(self, split: str) -> Examples:
        if split not in self.others:
            self.others[split] = move(held_out_examples(self.task, split), self.device)
        return self.others[split]
