"""Examples held in memory, and the batches made from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwise.lab.experiments.configuration import derive
from headwise.lab.experiments.evaluation import Batch
from headwise.lab.experiments.task import Task
from headwise_verdict import StudyError

Examples = Any
# parts of a tuple or list that an error message lists
MOST = 6


def leaves(examples: Examples, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor of the examples with its path, for example ("[0]['ids']", tensor)."""
    if isinstance(examples, dict):
        for key, part in examples.items():
            yield from leaves(part, f"{name}[{key!r}]")
    elif isinstance(examples, (tuple, list)):
        for index, part in enumerate(examples):
            yield from leaves(part, f"{name}[{index}]")
    else:
        yield name, examples


def take(examples: Examples, index: Any) -> Examples:
    """Return the examples at an index, a slice or a tensor of indices."""
    if isinstance(examples, Tensor):
        return examples[index]
    if isinstance(examples, dict):
        return {key: take(part, index) for key, part in examples.items()}
    return _like(examples, [take(part, index) for part in examples])


def first(examples: Examples, count: int) -> Examples:
    """Return a copy of the first examples, at most `count`, so that a task's batch() cannot write into the data."""
    return take(examples, torch.arange(min(count, size(examples)), device=place(examples)))


def move(examples: Examples, device: torch.device) -> Examples:
    """Return the examples on a device."""
    if isinstance(examples, Tensor):
        return examples.to(device)
    if isinstance(examples, dict):
        return {key: move(part, device) for key, part in examples.items()}
    if isinstance(examples, (tuple, list)):
        return _like(examples, [move(part, device) for part in examples])
    return examples


def _like(examples: Any, parts: list[Any]) -> Any:
    # keep the type of a named tuple
    return type(examples)(*parts) if hasattr(examples, "_fields") else tuple(parts)


def size(examples: Examples) -> int:
    """Return the number of examples."""
    return len(next(tensor for _, tensor in leaves(examples)))


def place(examples: Examples) -> torch.device:
    """Return the device that holds the examples."""
    return next(tensor.device for _, tensor in leaves(examples))


def describe(value: Any) -> str:
    """Return the shapes and types of a value, such as "(int64 (36, 64), int64 (36,))"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        # a list may hold one entry per example: show only the first ones
        more = f", and {len(value) - MOST} more" if len(value) > MOST else ""
        return "(" + ", ".join(map(describe, value[:MOST])) + more + ")"
    return f"{type(value).__name__}" if value is not None else "None"


def fault(examples: Examples) -> str | None:
    """Return what is wrong with the examples of a split, or None."""
    parts = list(leaves(examples))
    foreign = [f"{name or 'it'} is a {type(part).__name__}" for name, part in parts if not isinstance(part, Tensor)]
    if foreign:
        return f"{foreign[0]}, where a tensor should be"
    if not parts:
        return "it holds no tensor"
    flat = [name or "it" for name, part in parts if part.dim() == 0]
    if flat:
        return f"{flat[0]} has no first dimension"
    counts = {name: len(part) for name, part in parts}
    if len(set(counts.values())) > 1:
        return f"its parts hold {', '.join(map(str, counts.values()))} examples"
    return None if next(iter(counts.values())) else "it holds 0 examples"


# number of batches whose examples are sorted by length together: a larger pool wastes less padding and is less random
POOL = 64


def lengths_of(task: Task, examples: Examples) -> Tensor | None:
    """Return the length of each example on the CPU, or None if all have the same length.

    Raises StudyError if `lengths` returns anything else, if tokens_per_batch is set and `lengths` returns None, or if
    an example is longer than a batch may be.
    """
    name, count = type(task).__name__, size(examples)
    lengths = task.lengths(examples)
    if lengths is None:
        if task.tokens_per_batch is not None:
            raise StudyError(
                f"tokens_per_batch={task.tokens_per_batch} needs {name}.lengths(examples), which returned None."
            )
        return None
    if not isinstance(lengths, Tensor) or lengths.shape != (count,) or int(lengths.min()) < 1:
        raise StudyError(
            f"{name}.lengths returned {describe(lengths)}; return one length of at least 1 for each of {count} "
            "examples."
        )
    longest = int(lengths.max())
    if task.tokens_per_batch is not None and longest > task.tokens_per_batch:
        raise StudyError(
            f"an example of {name} has {longest} tokens, more than tokens_per_batch={task.tokens_per_batch}. Raise "
            "it, or leave such examples out of data()."
        )
    return lengths.cpu()


def training_batches(task: Task, count: int, lengths: Tensor | None, seed: int, epoch: int) -> list[Tensor]:
    """Return the indices of each batch of an epoch; they depend on (seed, epoch) only, not on the arm."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    order = torch.randperm(count, generator=generator)
    if lengths is None:
        return list(order.split(task.batch_size))
    tokens = task.tokens_per_batch
    per_batch = task.batch_size if tokens is None else max(1, int(tokens / lengths.double().mean()))
    batches: list[Tensor] = []
    for pool in order.split(POOL * per_batch):
        batches += cut_by_length(task, pool[lengths[pool].argsort(stable=True)], lengths, task.batch_size)
    return [batches[at] for at in torch.randperm(len(batches), generator=generator).tolist()]


def evaluation_batches(task: Task, count: int, lengths: Tensor | None, rank: int, world: int) -> list[Tensor]:
    """Return the indices of each batch that this process evaluates."""
    if rank >= count:
        # fewer examples than processes: torch would make one empty batch, whose mean loss is NaN
        return []
    if lengths is None:
        return list(torch.arange(rank, count, world).split(task.evaluation_batch_size))
    order = lengths.argsort(stable=True)[rank::world]
    return cut_by_length(task, order, lengths, task.evaluation_batch_size)


def epoch_steps(task: Task, count: int, lengths: Tensor | None, seed: int) -> int:
    """Return the number of optimizer steps of the first epoch."""
    if lengths is None:
        batches = math.ceil(count / task.batch_size)
    else:
        batches = len(training_batches(task, count, lengths, seed, 1))
    return math.ceil(batches / task.accumulation)


def first_batch(task: Task, examples: Examples, count: int) -> Examples:
    """Return a copy of the first examples, at most `count` and at most one batch."""
    head = first(examples, count)
    if task.tokens_per_batch is None:
        return head
    lengths = lengths_of(task, head)
    assert lengths is not None, "batches bounded by tokens have lengths"
    padded = lengths.cummax(0).values * torch.arange(1, size(head) + 1)
    return first(head, int((padded <= task.tokens_per_batch).sum()))


def draw_epoch(task: Task, sizes: list[list[int]], generator: torch.Generator, device: torch.device) -> list[list[Any]]:
    """Return what the task draws for the batches of each step, of the given sizes, on the device.

    It is drawn batch by batch on the CPU, and copied at once.
    """
    drawn = iter(_moved_at_once([task.draw(count, generator) for step in sizes for count in step], device))
    return [[next(drawn) for _ in step] for step in sizes]


def _moved_at_once(parts: list[Any], device: torch.device) -> list[Any]:
    """Return structures that are built alike on a device, with one copy for each tensor of a structure."""
    one = parts[0]
    if isinstance(one, Tensor):
        flat = torch.cat([part.flatten() for part in parts]).to(device).split([part.numel() for part in parts])
        return [values.view(part.shape) for values, part in zip(flat, parts, strict=True)]
    if isinstance(one, dict):
        named = {key: _moved_at_once([part[key] for part in parts], device) for key in one}
        return [{key: column[at] for key, column in named.items()} for at in range(len(parts))]
    if isinstance(one, (tuple, list)):
        columns = [_moved_at_once(list(column), device) for column in zip(*parts, strict=True)]
        return [_like(one, list(row)) for row in zip(*columns, strict=True)]
    return parts


def make_batch(task: Task, examples: Examples, drawn: Any, own: Any = None) -> Batch:
    """Return a batch made by the task, or by an evaluation's function `own`; raise StudyError for another type.

    Args:
        task: whose batch it is.
        examples: of the batch.
        drawn: what the task drew for the batch, or a generator from which it draws now; None in evaluation.
        own: makes the batch instead of the task's `batch`.
    """
    if isinstance(drawn, torch.Generator):
        drawn = move(task.draw(size(examples), drawn), place(examples))
    batch: Any = (own or task.batch)(examples, drawn)
    if not isinstance(batch, Batch):
        raise StudyError(
            f"{type(task).__name__}.batch returned {describe(batch)}; return headwise.study.Batch(inputs, targets). "
            f"It was given {describe(examples)}."
        )
    device = place(examples)
    return batch if device.type == "cpu" else Batch(*move(tuple(batch), device))


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Return the output of a model for a tensor, a sequence of positional arguments, or a mapping of keywords."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if hasattr(inputs, "keys") else model(*inputs)


def cut_by_length(task: Task, order: Tensor, lengths: Tensor, most: int) -> list[Tensor]:
    """Split examples sorted by length into batches of at most `most` examples, or of tokens_per_batch padded tokens."""
    tokens = task.tokens_per_batch
    if tokens is None:
        return list(order.split(most))
    cuts, start = [], 0
    for at, length in enumerate(lengths[order].tolist()):
        # examples are sorted, so the last is the longest and all are padded to its length
        if length * (at - start + 1) > tokens:
            cuts.append(at)
            start = at
    return list(torch.tensor_split(order, cuts))
