"""Trainings as scripts run them: healthy ones unlike those of the study, and ones with the faults of a script."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import headwise
from headwise_papers.alarms.faults import BETAS, DECAY, WARMUP
from headwise_papers.alarms.models import Family

Batch = tuple[Tensor, Tensor]
# a family with its data, or only what is known of all its members
Kind = Family | type[Family]
# the projections of queries, keys, values and outputs, by the last part of their names
PROJECTIONS = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "o_proj"))
# where branches end: there dropout is applied
ENDS = ("out", "o_proj", "down_proj", "2")


class Script:
    """A training with its model, optimizer and batches; a subclass changes what one script does differently.

    Attributes:
        says: what the script does, as shown in tables.
        onset: the first step of a fault; 0 for a healthy training.
    """

    says = "as in the study"
    onset = 0

    def __init__(self, family: Family, model: nn.Module, seed: int, steps: int, rate: float = 1.0) -> None:
        self.family, self.model, self.steps = family, model, steps
        self.multiple = rate
        self.draw = torch.Generator().manual_seed(1_000 + seed)
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> AdamW:
        """Return an optimizer without state: gains and biases in a second group."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        few, many = [p for p in parameters if p.dim() < 2], [p for p in parameters if p.dim() >= 2]
        groups: list[dict[str, Any]] = [{"params": many}, {"params": few, "gains": True}]
        return AdamW(groups, lr=self.family.rate, betas=BETAS, weight_decay=DECAY, fused=True)

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether a family's training can be run so."""
        return True

    def rate(self, step: int) -> float:
        """Return the multiple of the family's learning rate at a step."""
        return min(1.0, (step + 1) / WARMUP)

    def before(self, step: int, watch: headwise.Watch) -> headwise.Watch:
        """Change model or optimizer before a step; return the watch, a new one after a restart."""
        return watch

    def batch(self, step: int) -> Batch:
        """Return inputs and targets of a step."""
        return self.family.batch(self.draw)

    def backward(self, step: int) -> Tensor:
        """Add the gradients of a step, and return its loss."""
        loss = self.family.loss(self.model, *self.batch(step))
        loss.backward()
        return loss.detach()

    def after(self, step: int) -> None:
        """Change gradients before the optimizer's step."""

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Take one step of the optimizer, and return the loss and the gradient norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.family.rate * self.multiple * self.rate(step)
        self.optimizer.zero_grad()
        loss = self.backward(step)
        self.after(step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step()
        return loss, norm


class LongWarmup(Script):
    """A warm-up over half of the training, then a fall to zero by a cosine."""

    says = "warm-up for half of the steps, then a cosine to 0"

    def rate(self, step: int) -> float:
        """Return the multiple of the learning rate."""
        half = self.steps / 2
        return (step + 1) / half if step < half else (1 + math.cos(math.pi * (step / half - 1))) / 2


class Dropout(Script):
    """Dropout where the branches of each block end."""

    says = "dropout 0.1"

    def __init__(self, family: Family, model: nn.Module, seed: int, steps: int, rate: float = 1.0) -> None:
        super().__init__(family, model, seed, steps, rate)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in ENDS:
                module.register_forward_hook(lambda one, _, out: F.dropout(out, 0.1, one.training))

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether the model has no dropout of its own."""
        return not family.has_dropout


class Accumulated(Script):
    """Gradients of four batches added before each step."""

    says = "gradients of 4 batches a step"

    def backward(self, step: int) -> Tensor:
        """Add the gradients of four batches, and return their mean loss."""
        losses = []
        for _ in range(4):
            loss = self.family.loss(self.model, *self.batch(step)) / 4
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


class Autocast(Script):
    """Forward passes in bf16 by autocast."""

    says = "bf16 by autocast"

    def backward(self, step: int) -> Tensor:
        """Add the gradients of a forward pass in bf16."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.family.loss(self.model, *self.batch(step))
        loss.backward()
        return loss.detach()


class Resumed(Script):
    """A stop at half of the training, and a new process that continues from the checkpoint."""

    says = "stopped at half, and resumed"

    def before(self, step: int, watch: headwise.Watch) -> headwise.Watch:
        """Resume with the states of the checkpoint and the records so far."""
        if step != self.steps // 2:
            return watch
        known = watch.records()
        watch.remove()
        states = self.model.state_dict(), self.optimizer.state_dict()
        self.model.load_state_dict(states[0])
        self.optimizer = self.new_optimizer()
        self.optimizer.load_state_dict(states[1])
        resumed = headwise.watch(self.model, on_alert=None)
        resumed.step_to(step, known)
        return resumed


class Clipped(Script):
    """Gradients clipped to a norm of 1."""

    says = "gradients clipped at 1"

    def after(self, step: int) -> None:
        """Clip the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class SmallBatches(Script):
    """Batches of four examples at half of the rate."""

    says = "batches of 4, rate × 0.5"

    def rate(self, step: int) -> float:
        """Return half of the usual multiple."""
        return super().rate(step) / 2

    def batch(self, step: int) -> Batch:
        """Return the first four examples of a batch."""
        inputs, targets = super().batch(step)
        return inputs[:4], targets[:4]


class FewExamples(Script):
    """The same eight batches in every epoch, in another order each time, until they are known by heart."""

    says = "8 batches, again and again"

    def __init__(self, family: Family, model: nn.Module, seed: int, steps: int, rate: float = 1.0) -> None:
        super().__init__(family, model, seed, steps, rate)
        self.batches = [family.batch(self.draw) for _ in range(8)]

    def batch(self, step: int) -> Batch:
        """Return a batch of the epoch."""
        if step % 8 == 0:
            self.order = torch.randperm(8, generator=self.draw).tolist()
        return self.batches[self.order[step % 8]]


HEALTHY: tuple[type[Script], ...] = (
    LongWarmup,
    Dropout,
    Accumulated,
    Autocast,
    Resumed,
    Clipped,
    SmallBatches,
    FewExamples,
)
