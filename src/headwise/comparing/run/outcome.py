"""What is written down of an epoch and of a finished run."""

from __future__ import annotations

import math
import statistics
from typing import Any

from headwise.comparing.run.job import Order
from headwise.comparing.run.train import Epoch, Examples, Training, evaluate
from headwise.files.provenance import device_hardware


def describe_epoch(
    training: Training, epoch: Epoch, number: int, validation: Examples | None, test: Examples | None
) -> dict[str, Any]:
    """Describe one epoch as a line of the metric stream."""
    name = training.task.metric_name
    line: dict[str, Any] = {
        "epoch": number,
        "step": training.step,
        "train_loss": epoch.loss,
        f"train_{name}": epoch.metric,
    }
    for split, examples in (("validation", validation), ("test", test)):
        if split == "test" and examples is None:
            continue
        known = examples is not None and epoch.diverged_at is None
        loss, metric = evaluate(training, examples) if known else (None, None)
        line |= {f"{split}_loss": loss, f"{split}_{name}": metric}
    line |= {"seconds": round(epoch.seconds, 4), "steps": epoch.steps}
    if epoch.apart.steps:
        line["apart"] = {"steps": epoch.apart.steps, "seconds": round(epoch.apart.seconds, 4)}
    return line


def describe_result(
    order: Order, training: Training, history: list[dict[str, Any]], diverged: int | None, splits
) -> dict:
    """Measure what a finished run is judged on; a model that gives NaN at the end has diverged at its last step."""
    task = training.task
    metrics: dict[str, Any] = {}
    for split, examples in splits.items():
        if split in ("validation", "test") and f"{split}_loss" in history[-1]:
            found = history[-1][f"{split}_loss"], history[-1][f"{split}_{task.metric_name}"]
        else:
            found = evaluate(training, examples) if examples is not None and diverged is None else (None, None)
        metrics |= {f"{split}_loss": found[0], f"{split}_{task.metric_name}": found[1]}
    if diverged is None and any(v is not None and not math.isfinite(v) for v in metrics.values()):
        diverged = training.step
    for kind in ("loss", task.metric_name):
        ends = metrics[f"train_{kind}"], metrics[f"test_{kind}"]
        metrics[f"gap_{kind}"] = None if None in ends else ends[0] - ends[1]
    model = training.accelerator.unwrap_model(training.model)
    metrics |= {
        "seconds_per_step": _seconds_per_step(history),
        "peak_memory_bytes": training.peak_memory,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": diverged or training.step,
        "epochs": len(history),
    }
    return {
        "status": "finished" if diverged is None else "diverged",
        "method": order.configuration.arm,
        "seed": order.configuration.seed,
        "hash": order.identity,
        "metrics": metrics,
        "diverged_at_step": diverged,
        "watched": order.watch,
        "config": order.configuration.model_dump(mode="json"),
        **order.environment,
        "hardware": {**order.environment.get("hardware", {}), **device_hardware(training.accelerator.device)},
    }


def _seconds_per_step(history: list[dict[str, Any]]) -> float:
    """Give the median over epochs of the time of a step, without the steps that also read or measured."""
    nothing = {"steps": 0, "seconds": 0.0}
    parts = [(line, line.get("apart", nothing)) for line in history]
    found = [
        (line["seconds"] - apart["seconds"]) / (line["steps"] - apart["steps"])
        for line, apart in parts
        if line["steps"] > apart["steps"]
    ]
    return statistics.median(found or [line["seconds"] / line["steps"] for line in history])
