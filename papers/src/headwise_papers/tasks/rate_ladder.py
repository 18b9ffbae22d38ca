"""A character language model trained from scratch at each of several learning rates in one run."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

import headwise
from headwise.lab.experiments.evaluation import Sums
from headwise.study import Evaluation, Metric, Phase
from headwise_papers.tasks.character_lm import CharacterLM, CharacterModel

# loss in nats per character, on the test text, of a model that knows only the characters' frequencies in the training
# text
UNIGRAM = 3.348
# number of test sequences on which heads and stream are measured
READ = 32
STATISTICS = ["entropy_share", "max_logit"]


class RateLadder(CharacterLM):
    """Training from scratch at each rate of a ladder, with the rate at which training fails as an outcome.

    A model has failed at a rate if its test loss is above `level`. The critical rate is the first rate above the arm's
    best one at which the loss, interpolated linearly in the logarithm of the rate between rungs, exceeds `level`; the
    highest rung if it never does. The sensitivity is the mean over rungs of the loss, capped at `UNIGRAM`, minus the
    best loss (Wortsman et al. 2023, arXiv 2309.14322).
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("critical_rate", "critical learning rate (log10)", unit="decades"),
        Metric("best_rate", "best learning rate (log10)", unit="decades"),
        Metric("best_loss", "loss at the best rate", higher_is_better=False, unit="nats per character"),
        Metric(
            "sensitivity", "loss above the best, mean over rates", higher_is_better=False, unit="nats per character"
        ),
        Metric("loss", higher_is_better=False, unit="nats per character"),
        Metric("perplexity", "perplexity per character", higher_is_better=False),
        Metric("entropy_share", "entropy of attention, share of ln(keys)"),
        Metric("least_entropy_share", "entropy of the lowest head, share of ln(keys)"),
        Metric("max_logit", "largest logit", higher_is_better=False),
        Metric("rank", "effective rank of the stream"),
    )

    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    level: float = Field(3.0, gt=0, description="nats per character above which a model has failed")

    @field_validator("rates")
    @classmethod
    def _is_a_ladder(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if len(rates) < 2 or list(rates) != sorted(set(rates)) or rates[0] <= 0:
            raise ValueError(f"rates rise from rung to rung, two at least, all above 0; got {rates}")
        return rates

    def phases(self) -> list[Phase]:
        """Return a phase for each rate, each with new weights."""
        return [Phase(_rung(rate), changes={"learning_rate": rate}, start="fresh") for rate in self.rates]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations: the test loss at every rate, and heads and stream on a few test sequences."""
        health = Evaluation("health", "test", _health, None, _counted, _mean, when="phase", limit=READ)
        never = [Evaluation(name, when="never") for name in ("train", "validation")]
        return [Evaluation("test", when="phase"), health, *never]

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return the ladder's critical rate, best rate, loss at the best rate and sensitivity."""
        losses = [outcomes[f"{_rung(rate)}/test/loss"] for rate in self.rates]
        best = min(range(len(losses)), key=lambda at: losses[at])
        excess = [min(loss, UNIGRAM) - losses[best] for loss in losses]
        return {
            "test/critical_rate": critical_rate(self.rates, losses, self.level),
            "test/best_rate": math.log10(self.rates[best]),
            "test/best_loss": losses[best],
            "test/sensitivity": max(0.0, math.fsum(excess) / len(excess)),
        }


def critical_rate(rates: tuple[float, ...], losses: list[float], level: float) -> float:
    """Return log10 of the first rate above the best one at which the loss exceeds `level`.

    The loss is interpolated linearly in log10 of the rate. It is the highest rung if the loss never exceeds `level`,
    the lowest if the best loss itself does.
    """
    best = min(range(len(losses)), key=lambda at: losses[at])
    logs = [math.log10(rate) for rate in rates]
    if losses[best] > level:
        return logs[0]
    for low in range(best, len(losses) - 1):
        if losses[low + 1] > level:
            share = (level - losses[low]) / (losses[low + 1] - losses[low])
            return logs[low] + share * (logs[low + 1] - logs[low])
    return logs[-1]


def effective_rank(tokens: Tensor) -> Tensor:
    """Return the effective rank (B,) of each sequence's tokens (B, T, C), from Roy and Vetterli 2007.

    It is e to the entropy of the normalised singular values, and 1 if all tokens are parallel, as in rank collapse
    (Dong et al. 2021, arXiv 2103.03404).
    """
    values = torch.linalg.svdvals(tokens.float())
    shares = values / values.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.special.entr(shares).sum(-1).exp()


def _rung(rate: float) -> str:
    return f"rate {rate:g}"


def _health(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Return statistics of the heads and the effective rank of the last norm's input, from one forward pass."""
    assert isinstance(model, CharacterModel)
    stream: list[Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda module, arguments: stream.append(arguments[0].detach()))
    watched = headwise.watch(model, every=1, on_alert=None, statistics=STATISTICS)
    try:
        # a watch reads forward passes in training mode; this model has nothing random
        model.train()
        model(inputs)
        watched.step()
        records = watched.records()
    finally:
        model.eval()
        watched.remove()
        hook.remove()
    values = {name: [float(r["value"]) for r in records if r["statistic"] == name] for name in STATISTICS}
    shares, logits = values["entropy_share"], values["max_logit"]
    figures = {"entropy_share": sum(shares) / len(shares), "least_entropy_share": min(shares), "max_logit": max(logits)}
    return {"rank": effective_rank(stream[0]).mean(), **{name: torch.tensor(value) for name, value in figures.items()}}


def _counted(output: dict[str, Tensor], targets: Any) -> Sums:
    return {"weight": torch.tensor(len(targets)), **{name: value * len(targets) for name, value in output.items()}}


def _mean(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: total / sums["weight"] for name, total in sums.items() if name != "weight"}
