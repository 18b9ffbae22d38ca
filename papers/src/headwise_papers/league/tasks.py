"""The controls of the league's worlds: settings of a task, so that a control can be an arm like the methods."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.training.batches import run_model
from headwise.study import Evaluation, Phase, Task
from headwise_papers.tasks.eight_bits import in_8_bits

# names of the models' branches; in a model of attention alone they are `layers.N`
BRANCHES = ("attn", "self_attn", "mlp")


class Controls(Task):
    """A mixin that adds residual dropout, label smoothing and early stopping to a task, all off by default.

    Every run also records the health of its heads, and its test outcomes with 8-bit weights.
    """

    head_statistics: tuple[str, ...] = ("attention_entropy", "head_redundancy", "stream_cosine")

    residual_dropout: float = Field(0.0, ge=0, lt=1, description="of what every branch adds to the stream")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the training target spread over all classes")
    stop_at: float = Field(
        1.0, gt=0, le=1, description="share of the epochs or steps after which training ends, its schedule with it"
    )

    def model(self) -> Any:
        """Return the model, with dropout at the end of every branch if set."""
        model: nn.Module = super().model()  # type: ignore[safe-super]  # of the task that follows
        if self.residual_dropout:
            for branch in branches(model):
                branch.register_forward_hook(Dropped(self.residual_dropout))
        return model

    def phases(self) -> list[Phase]:
        """Return the single phase, shortened if set."""
        (phase,) = super().phases()
        if self.stop_at == 1 or phase.changes:
            return [phase]
        length = (
            {"steps": _part(self.steps, self.stop_at)} if self.steps else {"epochs": _part(self.epochs, self.stop_at)}
        )
        # stop_at is reset for the phase, so that its length is not reduced twice
        return [Phase(phase.name, phase.data, changes={**length, "stop_at": 1.0})]

    def evaluations(self) -> list[Evaluation]:
        """Return the task's own evaluations, and one of the test data with 8-bit weights."""
        return [*super().evaluations(), Evaluation("int8", "test", _rounded)]

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Return the loss, in training with label smoothing if set (Szegedy et al. 2016, arXiv 1512.00567)."""
        loss: Tensor = super().loss(output, targets)
        if not self.label_smoothing or not torch.is_grad_enabled():
            return loss
        return (1 - self.label_smoothing) * loss + self.label_smoothing * self.uniform_loss(output, targets)

    def uniform_loss(self, output: Tensor, targets: Any) -> Tensor:
        """Return the cross entropy of uniform targets, in nats."""
        return -F.log_softmax(output.float(), -1).mean()


class Dropped:
    """A forward hook that applies dropout to the output of a branch in training."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        """Return the output with dropout; of a tuple, the first item is the branch's output."""
        if isinstance(output, tuple):
            return (F.dropout(output[0], self.p, module.training), *output[1:])
        return F.dropout(output, self.p, module.training)


def branches(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose output is added to the residual stream, in order."""
    named = [module for name, module in model.named_modules() if name.rpartition(".")[2] in BRANCHES]
    layers = getattr(model, "layers", None)
    modules = named or ([*layers] if isinstance(layers, nn.ModuleList) else [])
    if not modules:
        raise ValueError(
            f"residual dropout finds no branch in {type(model).__name__}; known are {', '.join(BRANCHES)} and layers"
        )
    return modules


def _rounded(model: nn.Module, inputs: Any) -> Any:
    with in_8_bits(model):
        return run_model(model, inputs)


def _part(whole: int, share: float) -> int:
    return max(1, math.floor(share * whole + 0.5))
