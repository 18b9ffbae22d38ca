"""Faults that are injected into a healthy training, with their time and severity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from headwise_papers.alarms.models import AlarmAttention, Family, Size

# steps of every run and of its warm-up; a fault during training begins at half of the run
STEPS, WARMUP = 256, 40
DECAY, BETAS = 0.1, (0.9, 0.98)
# duration in steps of the fall of a temperature, and of corrupted batches
FALL, CORRUPTED = 100, 20
HEALTHY, UNLISTED, SLOWLY = "healthy", "gradients kept", "healthy, warm-up of"


@dataclass(frozen=True)
class Fault:
    """One fault at one severity, or a healthy run at one multiple of the rate.

    Attributes:
        kind: the kind of the fault.
        severity: in the unit of the kind.
        at_start: whether the fault begins at the first step; else it begins at half of the run.
    """

    kind: str
    severity: float
    at_start: bool = False

    @property
    def label(self) -> str:
        """Return kind and severity as shown in tables."""
        return f"{self.kind} {self.severity:g}"

    @property
    def onset(self) -> int:
        """Return the first step of the fault."""
        return 0 if self.at_start else STEPS // 2


FAULTS = (
    Fault("rate ×", 3),
    Fault("rate ×", 10),
    Fault("no warm-up, rate ×", 1, at_start=True),
    Fault("no warm-up, rate ×", 3, at_start=True),
    Fault("temperature to", 0.1),
    Fault("temperature to", 0.02),
    Fault("weights rounded up, bits", 8),
    Fault("weights rounded up, bits", 2),
    Fault("shuffled labels, share", 0.3),
    Fault("shuffled labels, share", 1),
    Fault("outlier tokens, share", 0.1),
    Fault("outlier tokens, share", 1),
    Fault("query/key init ×", 4, at_start=True),
    Fault("query/key init ×", 16, at_start=True),
    Fault("β₂ 0.999, then rate ×", 5),
    Fault("β₂ 0.9999, then rate ×", 5),
    Fault("gains' decay", 0),
    Fault("gains' decay", -3),
    Fault("causal mask lost, share of blocks", 0.3),
    Fault("causal mask lost, share of blocks", 1),
    Fault("sorted by class, share of a batch", 0.5),
    Fault("sorted by class, share of a batch", 1),
)
# tried once, after all choices: the gradients of earlier steps are never cleared
SURPRISE = Fault(UNLISTED, 1)
# healthy runs whose learning rate rises for most of their steps; no threshold was set on such runs
SLOW = Fault(SLOWLY, 200)
# multiples of the learning rate at which a run counts as healthy
RATES = (0.3, 0.6, 1.0)


def faults_of(family: Family, size: Size) -> Iterator[Fault]:
    """Yield the faults that can be injected into a model."""
    can_round = any(isinstance(module, AlarmAttention) for module in family.model(size).modules())
    for fault in FAULTS:
        if fault.kind.startswith("no warm-up") and size.norm != "post":
            continue
        if fault.kind.startswith("weights rounded") and not can_round:
            continue
        if fault.kind.startswith("causal mask") and not family.causal:
            continue
        if fault.kind.startswith("sorted by class") and not family.has_classes:
            continue
        yield fault


class Injection:
    """The injection of a fault into one training: its weights, batches and optimizer."""

    def __init__(self, fault: Fault, family: Family, model: nn.Module, seed: int) -> None:
        self.fault, self.family, self.model = fault, family, model
        self.kind, self.severity = fault.kind, fault.severity
        self.draw = torch.Generator().manual_seed(10_000 + seed)
        if self.kind.startswith("query/key init"):
            scale_queries_and_keys(model, self.severity)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> AdamW:
        betas = BETAS
        if self.kind.startswith("β₂"):
            betas = (BETAS[0], float(self.kind.removeprefix("β₂ ").split(",")[0]))
        gains = [p for p in self.model.parameters() if p.dim() < 2]
        others = [p for p in self.model.parameters() if p.dim() >= 2]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": gains, "gains": True}]
        return AdamW(groups, lr=self.family.rate, betas=betas, weight_decay=DECAY, fused=True)

    def clear(self, step: int) -> None:
        """Clear the gradients, unless the fault is to keep them."""
        if self.kind != UNLISTED or step < self.fault.onset:
            self.optimizer.zero_grad()

    def before(self, step: int) -> None:
        """Set learning rates, decay, temperature and rounding for a step."""
        active = step >= self.fault.onset
        for group in self.optimizer.param_groups:
            group["lr"] = self.family.rate * self._rate(step, active)
            if group.get("gains"):
                group["weight_decay"] = self.severity if active and self.kind == "gains' decay" else DECAY
        if active and self.kind.startswith("temperature"):
            progress = min(1.0, (step - self.fault.onset + 1) / FALL)
            self.family.set_temperature(self.model, 1 + progress * (self.severity - 1))
        if active and self.kind.startswith("weights rounded"):
            for module in self.model.modules():
                if isinstance(module, AlarmAttention):
                    module.bits = int(self.severity)
        if self.kind.startswith("causal mask") and step == self.fault.onset:
            lose_causal_mask(self.model, self.severity)

    def _rate(self, step: int, active: bool) -> float:
        """Return the multiple of the family's learning rate."""
        steps = self.severity if self.kind == SLOWLY else WARMUP
        warm = 1.0 if self.kind.startswith("no warm-up") else min(1.0, (step + 1) / steps)
        multiplied = self.kind == HEALTHY or (active and "rate ×" in self.kind)
        return warm * (self.severity if multiplied else 1.0)

    def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, corrupted if the fault is active."""
        if self.kind.startswith("sorted by class") and step >= self.fault.onset:
            return self._sorted(step - self.fault.onset, inputs, targets)
        if not self.fault.onset <= step < self.fault.onset + CORRUPTED:
            return inputs, targets
        if self.kind.startswith("shuffled labels"):
            flat = targets.flatten()
            mixed = flat[torch.randperm(len(flat), generator=self.draw)]
            wrong = torch.rand(flat.shape, generator=self.draw) < self.severity
            targets = torch.where(wrong, mixed, flat).view_as(targets)
        if self.kind.startswith("outlier tokens"):
            inputs = self.family.outliers(inputs, self.severity, self.draw)
        return inputs, targets

    def _sorted(self, number: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch whose first rows are those of the next batch of a pass over the examples sorted by class."""
        rows = round(self.severity * len(inputs))
        of_class, labels = self.family.in_order(number, rows)
        return torch.cat([of_class, inputs[rows:]]), torch.cat([labels, targets[rows:]])


def lose_causal_mask(model: nn.Module, share: float) -> None:
    """Take the causal mask from the first share of the blocks while they train; in evaluation they keep it."""
    layers = [one for one in model.modules() if hasattr(one, "causal") or hasattr(one, "is_causal")]
    for layer in layers[: math.ceil(share * len(layers))]:
        name = "causal" if hasattr(layer, "causal") else "is_causal"
        layer.register_forward_pre_hook(lambda module, _, name=name: setattr(module, name, not module.training))


@torch.no_grad()
def scale_queries_and_keys(model: nn.Module, factor: float) -> None:
    """Multiply the weights of all query and key projections, which are found by their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in ("query", "key", "q_proj", "k_proj"):
            module.weight *= factor
