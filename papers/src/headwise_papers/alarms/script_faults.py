"""Faults of training scripts that the study of the alarms has not, each from one step on and for good."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import headwise
from headwise_papers.alarms.models import AlarmAttention
from headwise_papers.alarms.scripts import Batch, Kind, Script

ONSET = 130


class Broken(Script):
    """A training that is healthy until its onset."""

    onset = ONSET

    def before(self, step: int, watch: headwise.Watch) -> headwise.Watch:
        """Break what is broken once."""
        if step == self.onset:
            self.begin()
        return watch

    def begin(self) -> None:
        """Break model or optimizer, before the step of the onset."""

    def projections(self, *names: str) -> list[nn.Linear]:
        """Return the linear layers of these names, in the order of the blocks."""
        return [
            module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names
        ]

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether the model has a projection of queries, keys and values each."""
        return not family.has_dropout


class LabelsOfOthers(Broken):
    """Inputs and targets lose their pairs."""

    says = "labels shuffled"

    def batch(self, step: int) -> Batch:
        """Return inputs with the targets of other examples."""
        inputs, targets = super().batch(step)
        return inputs, targets.roll(1, 0) if step >= self.onset else targets


class FrozenHead(Broken):
    """A head of each layer gets no gradients."""

    says = "head 0 frozen"

    def after(self, step: int) -> None:
        """Clear the gradients of the first head's queries, keys and values."""
        if step >= self.onset:
            for layer in self.projections("query", "q_proj", "key", "k_proj", "value", "v_proj"):
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    parameter.grad[: len(parameter) // 4] = 0


class NormsDecay(Broken):
    """Weight decay of gains and biases a hundredfold."""

    says = "weight decay of norms × 100"

    def begin(self) -> None:
        """Raise the decay."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 100 if group.get("gains") else 1


class DeadRows(Broken):
    """The rows of a head's value projection are zero."""

    says = "value rows of head 0 zero"

    def before(self, step: int, watch: headwise.Watch) -> headwise.Watch:
        """Set the rows to zero at every step."""
        if step >= self.onset:
            with torch.no_grad():
                for layer in self.projections("value", "v_proj"):
                    for parameter in layer.parameters():
                        parameter[: len(parameter) // 4] = 0
        return watch


class OneDeadRow(DeadRows):
    """One row of each value projection is zero."""

    says = "one value row zero"

    def before(self, step: int, watch: headwise.Watch) -> headwise.Watch:
        """Set the row to zero at every step."""
        if step >= self.onset:
            with torch.no_grad():
                for layer in self.projections("value", "v_proj"):
                    layer.weight[0] = 0
        return watch


class Tied(Broken):
    """Keys get the projection of the queries."""

    says = "keys tied to queries"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether queries and keys have equal sizes."""
        return super().fits(family) and "Llama" not in family.name

    def begin(self) -> None:
        """Share the parameters."""
        for query, key in zip(self.projections("query"), self.projections("key"), strict=True):
            key.weight, key.bias = query.weight, query.bias


class PositionsLost(Broken):
    """Position embeddings are drawn again, as by a resume that does not find them."""

    says = "positions lost at a resume"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether positions are learned."""
        return "Llama" not in family.name

    def begin(self) -> None:
        """Draw them."""
        with torch.no_grad():
            positions = next(p for name, p in self.model.named_parameters() if "positions" in name or ".wpe" in name)
            positions.copy_(positions.std() * torch.randn(positions.shape, generator=self.draw))


class PaddingLeaks(Broken):
    """Padding is no longer masked, in training alone."""

    says = "padding mask lost"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether examples are padded."""
        return "padded" in family.name

    def begin(self) -> None:
        """Mask padding only where the model is evaluated."""
        self.model.register_forward_pre_hook(lambda model, _: setattr(model, "masks", not model.training))


class ScheduleRestarts(Broken):
    """A rate that has fallen to zero by a cosine starts again at its full height."""

    says = "rate restarts after a cosine to 0"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return True: every training has a rate."""
        return True

    def rate(self, step: int) -> float:
        """Return the multiple of the learning rate."""
        warm = super().rate(step)
        return warm if step >= self.onset else warm * (1 + math.cos(math.pi * step / self.onset)) / 2


class OptimizerLost(Broken):
    """The state of the optimizer is lost, and the rate stays."""

    says = "optimizer's state lost at a resume"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return True: every training has an optimizer."""
        return True

    def begin(self) -> None:
        """Begin with an optimizer without state."""
        self.optimizer = self.new_optimizer()


class ScaleLost(Broken):
    """Logits are no longer divided by the root of the width of a head."""

    says = "logits not divided by √d"

    def begin(self) -> None:
        """Set the temperature to the inverse of the root."""
        width = next(
            one.query.out_features // one.heads if isinstance(one, AlarmAttention) else one.head_dim
            for one in self.model.modules()
            if isinstance(one, AlarmAttention) or hasattr(one, "scaling")
        )
        self.family.set_temperature(self.model, float(width) ** -0.5)  # type: ignore[arg-type]


class Overflow(Broken):
    """One logit overflows in fp16."""

    says = "a query overflows in fp16"

    def begin(self) -> None:
        """Let one output of the first query projection be infinite in training."""

        def overflow(layer: nn.Module, _: object, out: Tensor) -> Tensor:
            return out * torch.ones_like(out).index_fill(-1, torch.tensor([0]), 1e9).half() if layer.training else out

        self.projections("query", "q_proj")[0].register_forward_hook(overflow)


class OneBatch(Broken):
    """The data loader gives the same batch again and again."""

    says = "one batch repeated"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return True: every training has batches."""
        return True

    def batch(self, step: int) -> Batch:
        """Return a new batch, or that of the onset."""
        if step <= self.onset:
            self.last = super().batch(step)
        return self.last


class RankMissing(Broken):
    """The gradients of one of four ranks are zero in the mean."""

    says = "gradients of 1 of 4 ranks missing"

    def backward(self, step: int) -> Tensor:
        """Add the gradients of three quarters of the batch, weighted as in a mean over all four."""
        if step < self.onset:
            return super().backward(step)
        inputs, targets = self.batch(step)
        rows = len(inputs) * 3 // 4
        loss = self.family.loss(self.model, inputs[:rows], targets[:rows])
        (0.75 * loss).backward()
        return loss.detach()


class OneRank(Broken):
    """Gradients are not averaged: one of four ranks' counts alone."""

    says = "gradients of 3 of 4 ranks missing"

    def backward(self, step: int) -> Tensor:
        """Add the gradients of one quarter of the batch."""
        if step < self.onset:
            return super().backward(step)
        inputs, targets = self.batch(step)
        loss = self.family.loss(self.model, inputs[: len(inputs) // 4], targets[: len(inputs) // 4])
        loss.backward()
        return loss.detach()


class NotInOptimizer(Broken):
    """An optimizer that is made again does not get the projections of the attention."""

    says = "attention not in the optimizer"

    def begin(self) -> None:
        """Leave the projections out."""
        names = ("query", "q_proj", "key", "k_proj", "value", "v_proj", "out", "o_proj")
        left_out = {id(p) for layer in self.projections(*names) for p in layer.parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in left_out]


class Ended(Broken):
    """The schedule has ended: the rate is zero."""

    says = "rate 0 for good"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return True: every training has a rate."""
        return True

    def rate(self, step: int) -> float:
        """Return the multiple of the learning rate."""
        return 0.0 if step >= self.onset else super().rate(step)


class TargetsLeak(Broken):
    """Inputs are no longer shifted, so that they are the targets."""

    says = "inputs are the targets"

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether inputs and targets are tokens."""
        return family.causal

    def batch(self, step: int) -> Batch:
        """Return targets as inputs."""
        inputs, targets = super().batch(step)
        return (targets if step >= self.onset else inputs), targets


class Sorted(Broken):
    """Batches come sorted by class."""

    says, share = "batches sorted by class", 1.0

    @classmethod
    def fits(cls, family: Kind) -> bool:
        """Return whether examples have classes."""
        return family.has_classes

    def batch(self, step: int) -> Batch:
        """Return a batch whose first rows are the next of the examples sorted by class."""
        inputs, targets = super().batch(step)
        if step < self.onset:
            return inputs, targets
        rows = round(self.share * len(inputs))
        of_class, labels = self.family.in_order(step - self.onset, rows)
        return torch.cat([of_class, inputs[rows:]]), torch.cat([labels, targets[rows:]])


class HalfSorted(Sorted):
    """Half of each batch comes sorted by class."""

    says, share = "half of each batch sorted by class", 0.5


def _all(kind: type[Script]) -> Iterator[type[Script]]:
    for one in kind.__subclasses__():
        yield one
        yield from _all(one)


FAULTS: tuple[type[Script], ...] = tuple(_all(Broken))
