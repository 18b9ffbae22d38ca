"""Build what a run trains: model, methods, optimizer, watch; equal initial weights for all methods of a seed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

from headwise.comparing.run.configuration import BASELINE, derive
from headwise.comparing.run.job import Order, is_first_process
from headwise.comparing.run.train import Examples, Training
from headwise.comparing.task import Task

if TYPE_CHECKING:
    from headwise import Regularized
    from headwise.watch import Watch

# the stream of a watched run
HEALTH = "health.jsonl"


def prepare(order: Order, task: Task, train: Examples) -> Training:
    """Build the model, fit the methods onto it and hand both to Accelerate; equal initial weights within a seed."""
    configuration = order.configuration
    device = torch.device(order.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    precision = "bf16" if configuration.dtype == "bfloat16" else "no"
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    torch.manual_seed(derive(configuration.seed, "weights"))
    model = task.model().to(accelerator.device)
    own = {id(parameter) for parameter in model.parameters()}
    regularized = _regularize(order, model, task, train, accelerator.device)
    added = [parameter for parameter in model.parameters() if id(parameter) not in own]
    groups = [{"params": [p for p in model.parameters() if id(p) in own], "weight_decay": task.weight_decay}]
    if added:
        # parameters that methods bring (gains, gates, γ) are never decayed
        groups.append({"params": added, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=task.learning_rate, fused=device.type == "cuda")
    training = Training(task, model, optimizer, accelerator, configuration.seed, regularized)
    if order.watch and is_first_process():
        training.watch = _watch(order, model, task, len(train[0]))
    training.model, training.optimizer = accelerator.prepare(model, optimizer)
    return training


def _regularize(
    order: Order, model: nn.Module, task: Task, train: Examples, device: torch.device
) -> Regularized | None:
    if order.configuration.method == BASELINE:
        return None
    from headwise import parse
    from headwise.regularizing.handle import regularize

    example = task.batch(train[0][:2].to(device), None)
    seed = derive(order.configuration.seed, "methods")
    return regularize(model, *parse(order.configuration.method), seed=seed, example=example)


def _watch(order: Order, model: nn.Module, task: Task, examples: int) -> Watch:
    """Read every head about fifty times in a run, but never in two steps on end; the report shows readings and alerts."""
    from headwise import JsonLines, watch

    steps = task.epochs * math.ceil(examples / task.batch_size)
    # the steps between readings are those whose time and memory are measured
    return watch(model, every=max(2, steps // 50), log=[JsonLines(order.folder / HEALTH)], on_alert=None)
