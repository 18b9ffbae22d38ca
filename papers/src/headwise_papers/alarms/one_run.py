"""One run: a training with or without a fault, recorded with its signals at every reading, its losses and alerts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

import headwise
from headwise.health.health_records import Record
from headwise.health.watching.losses import Spikes
from headwise.health.watching.rules import RULES, Thresholds
from headwise_papers.alarms.faults import STEPS, Fault, Injection
from headwise_papers.alarms.models import Family, Size

# steps between readings, and between evaluations
READ, EVALUATE = 8, 4
# replaces values that are not finite, because the files have no infinity
BEYOND = 1e300
STATISTICS = (
    "entropy_share",
    "lowest_entropy",
    "max_logit",
    "token_cosine",
    "high_frequency",
    "massive_activations",
    "query_norm",
    "key_norm",
    "value_norm",
    "output_norm",
    "head_redundancy",
    "spectral_norm_qk",
    "effective_rank_qk",
    "effective_rank_vo",
    "gradient_norm",
    "update_ratio",
    "update_entropy",
)
# the signals kept of a reading: the statistic, and its reduction over sites and heads to one number
KEPT = {
    "largest logit": ("max_logit", "max"),
    "least entropy": ("entropy_share", "min"),
    "mean entropy": ("entropy_share", "mean"),
    "entropy of the sharpest row": ("lowest_entropy", "min"),
    "token cosine": ("token_cosine", "max"),
    "massive activations": ("massive_activations", "max"),
    "query norm": ("query_norm", "max"),
    "key norm": ("key_norm", "max"),
    "value norm": ("value_norm", "max"),
    "spectral norm of QK": ("spectral_norm_qk", "max"),
    "effective rank of QK": ("effective_rank_qk", "min"),
    "update ratio": ("update_ratio", "max"),
    "update entropy": ("update_entropy", "min"),
    "gradient norm by layer": ("gradient_norm", "max"),
    "head redundancy": ("head_redundancy", "max"),
}


@dataclass(frozen=True)
class Cell:
    """One run of the study: family, size, fault and seed."""

    family: str
    size: Size
    fault: Fault
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the run's file."""
        size = f"{self.size.dim}x{self.size.depth}{self.size.norm}"
        words = f"{self.family} {size} {self.fault.label} seed {self.seed}"
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in words)


def carry_out(
    cell: Cell,
    family: Family,
    steps: int = STEPS,
    *,
    read: int = READ,
    evaluate: int | None = EVALUATE,
    statistics: Sequence[str] = STATISTICS,
) -> dict[str, Any]:
    """Train once, and return losses by step, evaluations, readings by signal, and the alerts of the shipped rules.

    Args:
        cell: the run.
        family: its model and data.
        steps: of the run.
        read: steps between readings.
        evaluate: steps between evaluations; None for none.
        statistics: what is read.
    """
    start = time.process_time()
    with torch.random.fork_rng([]):
        torch.manual_seed(cell.seed)
        model = family.model(cell.size).train()
    injection = Injection(cell.fault, family, model, cell.seed)
    draw = torch.Generator().manual_seed(1_000 + cell.seed)
    # alerts are evaluated later, so printing them would only fill the screen
    watch = headwise.watch(model, every=read, on_alert=None, statistics=list(statistics))
    losses: list[float] = []
    gradients: list[float] = []
    evaluated: list[tuple[int, float]] = []
    held_out = family.held_out()
    for step in range(steps):
        injection.before(step)
        inputs, targets = injection.batch(step, *family.batch(draw))
        injection.clear(step)
        loss = family.loss(model, inputs, targets)
        loss.backward()
        gradients.append(_size(model))
        losses.append(loss.item())
        injection.optimizer.step()
        watch.step()
        if evaluate is not None and step % evaluate == evaluate - 1:
            evaluated.append((step, _evaluate(family, model, held_out)))
        if not math.isfinite(losses[-1]):
            break
    watch.remove()
    return {
        "family": cell.family,
        "size": f"{cell.size.dim} wide, {cell.size.depth} blocks, {cell.size.norm}-norm",
        "kind": cell.fault.kind,
        "severity": cell.fault.severity,
        "onset": cell.fault.onset,
        "seed": cell.seed,
        "steps": len(losses),
        "every step": {
            "loss": [written(x) for x in losses],
            "gradient norm": [written(x) for x in gradients],
            "loss spike": [written(x) for x in Spikes().add(losses)],
            "loss spike of 50": [written(x) for x in Spikes(50).add(losses)],
            "gradient spike": [written(x) for x in Spikes().add(gradients)],
            "gradient spike of 50": [written(x) for x in Spikes(50).add(gradients)],
        },
        "evaluated": [(step, written(x)) for step, x in evaluated],
        **_readings(watch),
        "ill": ill_figures(watch.records()),
        "alerts": sorted({(alert["step"], alert["alert"]) for alert in watch.alerts()}),
        "seconds": time.process_time() - start,
    }


def _size(model: torch.nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@torch.no_grad()
def _evaluate(family: Family, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    model.eval()
    loss = family.loss(model, *batch).item()
    model.train()
    return loss


def _readings(watch: headwise.Watch) -> dict[str, Any]:
    """Return the steps of the readings, and one number per reading for each signal."""
    figures: dict[tuple[str, int], list[float]] = {}
    for record in watch.records():
        figures.setdefault((record["statistic"], record["step"]), []).append(record["value"])
    steps = sorted({step for _, step in figures})
    readings = {
        name: [written(_one(figures.get((statistic, step), []), how)) for step in steps]
        for name, (statistic, how) in KEPT.items()
    }
    return {"read": steps, "readings": readings}


def ill_figures(records: list[Record]) -> list[list[Any]]:
    """Return each figure beyond its limit in each reading: step, alert, statistic, site and head.

    They suffice to know which alerts any choice of these readings raises, as every figure is in every reading.
    """
    rules = [rule(Thresholds()) for rule in RULES]
    ill: list[list[Any]] = []
    for step, group in groupby(sorted(records, key=lambda one: one["step"]), key=lambda one: one["step"]):
        of_step = list(group)
        finite: dict[str, list[Record]] = {}
        for record in of_step:
            if math.isfinite(record["value"]):
                finite.setdefault(record["statistic"], []).append(record)
        for rule in rules:
            for found in rule.findings(finite, of_step):
                if found.ill:
                    statistic = found.record["statistic"] if rule.per_statistic else ""
                    ill.append([step, rule.alert, statistic, found.record["site"], found.record["head"]])
    return ill


def _one(values: list[float], how: str) -> float | None:
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    if how == "mean":
        return math.fsum(values) / len(values)
    return max(values) if how == "max" else min(values)


def written(value: float | None) -> float | None:
    """Return a number for a file: six digits, `BEYOND` if it is not finite, None if it is unknown."""
    if value is None:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else BEYOND
