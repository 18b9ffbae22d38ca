"""Examples: a tensor, or tuples, lists and dicts of tensors, with one example in each row of the first dimension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Examples = Any
# parts of a tuple or list that an error names
MOST = 6


def leaves(examples: Examples, name: str = "") -> Iterator[tuple[str, Any]]:
    """Give every tensor of the examples with its place, for example ("[0]['ids']", tensor)."""
    if isinstance(examples, dict):
        for key, part in examples.items():
            yield from leaves(part, f"{name}[{key!r}]")
    elif isinstance(examples, (tuple, list)):
        for index, part in enumerate(examples):
            yield from leaves(part, f"{name}[{index}]")
    else:
        yield name, examples


def take(examples: Examples, index: Any) -> Examples:
    """Give the examples at an index, a slice or a tensor of indices."""
    if isinstance(examples, Tensor):
        return examples[index]
    if isinstance(examples, dict):
        return {key: take(part, index) for key, part in examples.items()}
    return _like(examples, [take(part, index) for part in examples])


def first(examples: Examples, count: int) -> Examples:
    """Give the first examples, at most `count`, as a copy: what a task's batch() writes in place never reaches the data."""
    return take(examples, torch.arange(min(count, size(examples)), device=place(examples)))


def move(examples: Examples, device: torch.device) -> Examples:
    """Move examples onto a device, whole."""
    if isinstance(examples, Tensor):
        return examples.to(device)
    if isinstance(examples, dict):
        return {key: move(part, device) for key, part in examples.items()}
    if isinstance(examples, (tuple, list)):
        return _like(examples, [move(part, device) for part in examples])
    return examples


def _like(examples: Any, parts: list[Any]) -> Any:
    # a named tuple stays one
    return type(examples)(*parts) if hasattr(examples, "_fields") else tuple(parts)


def size(examples: Examples) -> int:
    """Count the examples."""
    return len(next(tensor for _, tensor in leaves(examples)))


def place(examples: Examples) -> torch.device:
    """Name the device the examples lie on."""
    return next(tensor.device for _, tensor in leaves(examples))


def describe(value: Any) -> str:
    """Say what a value is, with shapes and types: "(int64 (36, 64), int64 (36,))"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        # a list of sentences is one thing, however many there are
        more = f", and {len(value) - MOST} more" if len(value) > MOST else ""
        return "(" + ", ".join(map(describe, value[:MOST])) + more + ")"
    return f"{type(value).__name__}" if value is not None else "None"


def fault(examples: Examples) -> str | None:
    """Say what is wrong with the examples of a split, None where nothing is."""
    found = list(leaves(examples))
    foreign = [f"{name or 'it'} is a {type(part).__name__}" for name, part in found if not isinstance(part, Tensor)]
    if foreign:
        return f"{foreign[0]}, where a tensor should be"
    if not found:
        return "it holds no tensor"
    flat = [name or "it" for name, part in found if part.dim() == 0]
    if flat:
        return f"{flat[0]} has no first dimension"
    counts = {name: len(part) for name, part in found}
    if len(set(counts.values())) > 1:
        return f"its parts hold {', '.join(map(str, counts.values()))} examples"
    return None if next(iter(counts.values())) else "it holds 0 examples"
