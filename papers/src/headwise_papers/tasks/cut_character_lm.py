"""The character language model, also evaluated after its heads are cut to their pseudo-rank."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attend.compressing.compress import compress
from headwise.lab.experiments.evaluation import Sums
from headwise.study import Evaluation, Metric
from headwise_papers.tasks.character_lm import CharacterLM

# number of windows in the batch of timed forward passes
TIMED = 16


class Outcome(NamedTuple):
    """The logits of the cut and of the plain model, and the shares that the cut left."""

    cut: Tensor
    plain: Tensor
    # ratios to the plain model's
    projections: float
    parameters: float
    time: float


class CutCharacterLM(CharacterLM):
    """Prediction of the next character, finally also with every head cut at several shares of its singular values."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        *CharacterLM.metrics,
        Metric("lost", "loss by the cut", higher_is_better=False, unit="nats per character"),
        Metric("projections", "parameters of the projections left by the cut", higher_is_better=False, unit="%"),
        Metric("parameters", "parameters of the model left by the cut", higher_is_better=False, unit="%"),
        Metric("time", "time of a forward after the cut, over before", higher_is_better=False),
    )

    energies: tuple[float, ...] = (0.8, 0.9, 0.95, 0.99)

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, including the test data after each cut."""
        return super().evaluations() + [
            Evaluation(name_of(energy), split="test", output=self._output(energy), count=self._count, finish=_finish)
            for energy in self.energies
        ]

    def _output(self, energy: float) -> Any:
        def output(model: nn.Module, inputs: Tensor) -> Outcome:
            cut = copy.deepcopy(model)
            compression = compress(cut, energy, example=inputs[:TIMED])
            assert compression.seconds is not None
            return Outcome(
                cut(inputs),
                model(inputs),
                compression.attention.ratio,
                compression.parameters.ratio,
                compression.seconds.ratio,
            )

        return output

    def _count(self, output: Outcome, targets: Tensor) -> Sums:
        plain = self.count(output.plain, targets)
        shares = {name: torch.tensor(getattr(output, name)) for name in ("projections", "parameters", "time")}
        # these shares do not depend on the batch, so batches have equal weight
        return {**self.count(output.cut, targets), "plain": plain["nats"], "batches": torch.tensor(1), **shares}


def name_of(energy: float) -> str:
    """Return the name of the evaluation after a cut."""
    return f"cut at {energy:g}"


def _finish(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = sums["nats"] / sums["characters"]
    metrics = {"loss": loss, "perplexity": loss.exp(), "lost": loss - sums["plain"] / sums["characters"]}
    return metrics | {name: sums[name] / sums["batches"] for name in ("projections", "parameters", "time")}
