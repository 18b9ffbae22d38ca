"""One run: a folder that can be left at any moment and gone on with, to the same numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from filelock import FileLock, Timeout

from headwise.comparing.results.digests import HEALTH, digests
from headwise.comparing.run.checkpoint import (
    Checkpoint,
    drop_previous,
    flatten_optimizer,
    load_checkpoint,
    restore_optimizer,
    save_checkpoint,
)
from headwise.comparing.run.damage import clear_damage
from headwise.comparing.run.job import Order, is_first_process
from headwise.comparing.run.outcome import describe_epoch, describe_result
from headwise.comparing.run.prepare import prepare
from headwise.comparing.run.splits import move, test_examples, to_device, training_examples
from headwise.comparing.run.train import Examples, Training, train_epoch
from headwise.comparing.task import Task
from headwise.files.durable import append_line, read_lines, restore_lines, write_json
from headwise.files.errors import StudyError

# seconds; a worker that was killed frees its lock at once, one that is ending needs a moment
LOCK_PATIENCE = 20.0

Tell = Callable[[dict[str, Any]], None]


def execute(order: Order, tell: Tell) -> dict[str, Any]:
    """Carry out one run, from its last whole checkpoint where there is one, and give its result."""
    order.folder.mkdir(parents=True, exist_ok=True)
    if is_first_process():
        try:
            with FileLock(order.folder / ".lock", timeout=LOCK_PATIENCE):
                clear_damage(order, lambda text: tell({"event": "note", "text": text}))
                return order.result() or _execute(order, tell)
        except Timeout:
            raise StudyError(
                f"another process works on {order.folder}. Wait for it, or choose another --out."
            ) from None
    return order.result() or _execute(order, tell)


def _execute(order: Order, tell: Tell) -> dict[str, Any]:
    configuration, task = order.configuration, order.task()
    torch.set_num_threads(configuration.threads)
    if is_first_process():
        write_json(order.folder / "config.json", configuration.model_dump(mode="json"))
    examples = training_examples(task, configuration)
    training = prepare(order, task, examples[0])
    try:
        result = _train(order, training, examples, tell)
    finally:
        # the next run of this process must find nothing of this one
        if training.watch is not None:
            training.watch.remove()
        if training.regularized is not None:
            training.regularized.remove(discard=True)
    if is_first_process():
        result |= {"digests": digests(order.folder)}
        write_json(order.folder / "result.json", result)
        drop_previous(order.folder)
    return result


def _train(order: Order, training: Training, examples: tuple[Examples, Examples | None], tell: Tell) -> dict[str, Any]:
    """Train from the last checkpoint to the end and judge what came out; the test split is asked for last."""
    task, device = training.task, training.accelerator.device
    train, validation = move(examples[0], device), to_device(examples[1], device)
    final = order.configuration.purpose == "final"
    test = move(test_examples(task), device) if final and task.test_curve else None
    history = _resume(order, training, lambda text: tell({"event": "note", "text": text}))
    diverged = None
    while len(history) < task.epochs and diverged is None:
        progress = _progress(task, len(train[0]), len(history), tell)
        epoch = train_epoch(training, train, len(history) + 1, progress)
        diverged = epoch.diverged_at
        history.append(describe_epoch(training, epoch, len(history) + 1, validation, test))
        _keep(order, training, history, checkpoint=diverged is None)
    if final and test is None and diverged is None:
        test = move(test_examples(task), device)
    splits = {"train": train, "validation": validation, "test": test}
    return describe_result(order, training, history, diverged, splits)


def _resume(order: Order, training: Training, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Put the training back to its last whole checkpoint and the metric stream with it; give the history."""
    checkpoint = load_checkpoint(order.folder, note)
    history = checkpoint.state["history"] if checkpoint else []
    if checkpoint:
        named = checkpoint.tensors
        model = {k.removeprefix("model."): t for k, t in named.items() if k.startswith("model.")}
        moments = {k.removeprefix("optimizer."): t for k, t in named.items() if k.startswith("optimizer.")}
        training.accelerator.unwrap_model(training.model).load_state_dict(model)
        restore_optimizer(_bare(training.optimizer), moments, checkpoint.state["optimizer"])
        training.step = checkpoint.state["step"]
        training.peak_memory = checkpoint.state["peak_memory"]
        if training.regularized is not None:
            training.regularized.load_state(checkpoint.state["draws"])
    if is_first_process():
        restore_lines(order.folder / "metrics.jsonl", history)
    if training.watch is not None:
        training.watch.step_to(training.step)
    if training.watch is not None and is_first_process():
        # a reading of step n was taken before the update n + 1
        kept = [record for record in read_lines(order.folder / HEALTH) if record["step"] < training.step]
        restore_lines(order.folder / HEALTH, kept)
    return history


def _keep(order: Order, training: Training, history: list[dict[str, Any]], *, checkpoint: bool) -> None:
    """Append the last epoch to the metric stream and save a checkpoint."""
    if not is_first_process():
        return
    append_line(order.folder / "metrics.jsonl", history[-1])
    if not checkpoint:
        return
    moments, plain = flatten_optimizer(_bare(training.optimizer))
    model = training.accelerator.unwrap_model(training.model).state_dict()
    tensors = {f"model.{k}": t for k, t in model.items()} | {f"optimizer.{k}": t for k, t in moments.items()}
    state = {
        "history": history,
        "step": training.step,
        "optimizer": plain,
        "peak_memory": training.peak_memory,
        "draws": training.regularized.state() if training.regularized is not None else None,
    }
    save_checkpoint(order.folder, Checkpoint(tensors, state))


def _progress(task: Task, examples: int, done: int, tell: Tell) -> Callable[[int, float, float], None]:
    per_epoch, start = math.ceil(examples / task.batch_size), time.perf_counter()

    def report(step: int, loss: float, metric: float) -> None:
        reached, total = done * per_epoch + step, per_epoch * task.epochs
        line = {"event": "progress", "epoch": done + 1, "epochs": task.epochs, "done": reached / total}
        left = (time.perf_counter() - start) / step * (total - reached)
        tell(line | {"loss": loss, "metric": metric, "name": task.metric_name, "left": left})

    return report


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
