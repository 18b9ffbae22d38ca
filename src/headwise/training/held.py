"""The splits of a run: asked for when they are needed, moved to the device once, kept while the run lasts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from headwise.experiments.evaluation import Evaluation
from headwise.experiments.task import Task
from headwise.training.batches import first_batch
from headwise.training.examples import Examples, move, take
from headwise.training.splits import held_out_examples


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
    # asked for before they are needed, not yet on the device
    waiting: dict[str, Examples] = field(default_factory=dict)

    def examples(self, evaluation: Evaluation) -> Examples | None:
        """Give the examples of an evaluation; None for those that a trial may not see, or that do not exist."""
        if evaluation.split == "train":
            return self.train
        if evaluation.split == "validation":
            return self.validation
        return self._other(evaluation.split) if self.final else None

    def few(self, evaluation: Evaluation, count: int) -> Examples | None:
        """Give the first examples of an evaluation; the others stay off the device until they are needed."""
        found = self.ahead(evaluation)
        return None if found is None else move(first_batch(self.task, found, count), self.device)

    def ahead(self, evaluation: Evaluation) -> Examples | None:
        """Give all examples of an evaluation before they are needed, wherever they lie; at most `limit` of them."""
        if evaluation.split in ("train", "validation") or not self.final:
            found = self.examples(evaluation)
        else:
            if evaluation.split not in self.waiting:
                self.waiting[evaluation.split] = held_out_examples(self.task, evaluation.split)
            found = self.waiting[evaluation.split]
        if found is None or evaluation.limit is None:
            return found
        return take(found, slice(0, evaluation.limit))

    def judged(self) -> tuple[Evaluation, Examples]:
        """Give the deciding evaluation and the examples it is made on; training's where a trial may not see them."""
        deciding = next(e for e in self.evaluations if e.name == self.task.decides_on)
        found = self.examples(deciding)
        return (Evaluation("train"), self.train) if found is None else (deciding, found)

    def only(self, evaluations: list[Evaluation]) -> Held:
        """Give the same splits with fewer evaluations."""
        return replace(self, evaluations=evaluations)

    def _other(self, split: str) -> Examples:
        if split not in self.others:
            found = self.waiting.pop(split, None)
            found = held_out_examples(self.task, split) if found is None else found
            self.others[split] = move(found, self.device)
        return self.others[split]
