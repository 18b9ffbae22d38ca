"""Training steps as CUDA graphs: a step is captured once and replayed, so that Python launches no kernel of it again.

Small models wait for Python, which launches hundreds of kernels a step. What is captured is the zeroing of gradients,
the forward, the backward, clipping and the optimizer's step. Everything else happens as in any other step: batches are
made, the learning rate is written, methods act after the step, readings are taken and checkpoints are written. The
numbers are those of the other loop, but for a learning rate that is rounded to single precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.attend import FittedLayer, HeldKeys
from headwise.borders import DispatchMode, moves, tree_leaves, writes
from headwise.lab.experiments.evaluation import Batch
from headwise.lab.experiments.recipe import Recipe
from headwise.lab.training.batches import leaves
from headwise_verdict import StudyError

# of batches and their shares, to what is measured on them
Update = Callable[[list[Batch], list[Any]], Any]
Replay = Callable[[], None]
# steps of a shape before it is captured: the optimizer's state and the kernels are made in them
WARM = 3
# shapes of batches that are captured; steps of others are taken one kernel after the other
MOST_SHAPES = 4
# kinds of steps that are counted before counting starts again
MOST_KINDS = 1000
CAPTURABLE = ("adamw", "adam", "sgd")


@dataclass
class Captured:
    """A captured step: its draws' keys, its batches and results in memory that stays, and what runs it again."""

    keys: HeldKeys
    batches: list[Batch]
    measured: Any
    replay: Replay


class StepGraphs:
    """The captured steps of one phase, one for each shape of batches.

    Args:
        optimizer: of the training; None for what moves no parameter.
        device: of the training.
        fitted: the layers that the methods act on.
        record: runs a function once, and returns its result and a function that repeats its kernels.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        fitted: Sequence[FittedLayer] = (),
        record: Callable[[Callable[[], Any]], tuple[Any, Replay]] | None = None,
    ) -> None:
        # with its number, as tensors name it
        self.device = torch.empty(0, device=device).device
        self.fitted, self.record = list(fitted), record or on_cuda
        self.keys: dict[Any, HeldKeys] = {}
        self.captured: dict[Any, Captured] = {}
        self.taken: Counter[Any] = Counter()
        # why no further step is captured
        self.reason = ""
        if optimizer is not None:
            _make_capturable(optimizer, device)

    def step(self, update: Update, batches: list[Batch], shares: list[Any]) -> Any:
        """Take one optimizer step by `update(batches, shares)`, captured if it can be; return what it returns.

        While a schedule changes a strength, each step is of another kind, and none is captured.
        """
        kind = _kind(batches, shares), self._strengths()
        captured = self.captured.get(kind)
        if captured is not None:
            for static, given in zip(_tensors(captured.batches), _tensors(batches), strict=True):
                static.copy_(given)
            captured.keys.write(self.device)
            captured.replay()
            captured.keys.count()
            for layer in self.fitted:
                layer.reached = True
            return captured.measured
        self.taken[kind] += 1
        if len(self.taken) > MOST_KINDS:
            self.taken.clear()
        if self.reason or self.taken[kind] <= WARM or len(self.captured) >= MOST_SHAPES:
            return self._take(kind, update, batches, shares)
        return self._capture(kind, update, batches, shares)

    def told(self) -> str:
        """Return how the steps were taken, for the report."""
        if self.captured:
            return "captured as CUDA graphs"
        return f"not captured: {self.reason}" if self.reason else "not captured: too few of one shape"

    def _strengths(self) -> tuple[float, ...]:
        """Return the strengths that are kept on the CPU: they become numbers in the captured kernels."""
        return tuple(float(strength) for strength in self._kept())

    def _kept(self) -> list[Tensor]:
        states = [state for layer in self.fitted for state in layer.states]
        strengths = [strength for state in states for strength in state.strengths.values()]
        return [strength for strength in strengths if strength.device.type == "cpu"]

    def _take(self, kind: Any, update: Update, batches: list[Batch], shares: list[Any]) -> Any:
        """Take a step kernel by kernel: the last but one before a capture lists its passes, the last is looked at."""
        left = WARM - self.taken[kind]
        if self.reason or left not in (0, 1) or len(self.captured) >= MOST_SHAPES:
            return _aside(self.device, lambda: update(batches, shares))
        if left == 1:
            keys = self.keys[kind] = HeldKeys(layer.passes for layer in self.fitted)
            with keys.listing():
                return _aside(self.device, lambda: update(batches, shares))
        keys, found = self.keys[kind], Obstacles(self.device, self._kept())
        keys.write(self.device)
        with keys.holding(), found:
            measured = _aside(self.device, lambda: update(batches, shares))
        self.reason = found.reason
        return measured

    def _capture(self, kind: Any, update: Update, batches: list[Batch], shares: list[Any]) -> Any:
        static = [Batch(*_copied(tuple(batch))) for batch in batches]
        keys = self.keys[kind]
        keys.write(self.device)
        with keys.holding():
            measured, replay = self.record(lambda: update(static, shares))
        self.captured[kind] = Captured(keys, static, measured, replay)
        return measured


def why_not(recipe: Recipe, device: torch.device, processes: int) -> str:
    """Return why no step of a training can be captured as a CUDA graph, or ""."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and this runs on {device.type}"
    if processes > 1:
        return "several processes train one model"
    if recipe.optimizer not in CAPTURABLE:
        return f"the optimizer {recipe.optimizer} reads its learning rate in Python; {', '.join(CAPTURABLE)} do not"
    return ""


def captures(choice: str, recipe: Recipe, device: torch.device, processes: int) -> bool:
    """Return whether steps are to be captured, by the choice auto, on or off.

    Raises:
        StudyError: if they are to be captured and cannot be.
    """
    reason = "" if choice == "off" else why_not(recipe, device, processes)
    if reason and choice == "on":
        raise StudyError(f"--graphs on: {reason}. Use --graphs auto, which then takes steps kernel by kernel.")
    return choice != "off" and not reason


class Obstacles(DispatchMode):
    """Finds in a step what a graph would not repeat.

    Args:
        device: of the training.
        known: tensors whose numbers are known to be the same in each replay.

    Attributes:
        reason: the first obstacle, or "".
    """

    def __init__(self, device: torch.device, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.device, self.reason = device, ""
        self.known = {tensor.data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at where it computes."""
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        here = [x for x in given if x.device == self.device and x.data_ptr() not in self.known]
        if here and torch.Tag.data_dependent_output in func.tags:
            self._note("a number of the device is read in Python")
        elif here and _is_sized_by_numbers(func, args, kwargs or {}):
            self._note(f"the size of what {func} gives depends on the device's numbers")
        elif func in COPIES and here and isinstance(out, Tensor) and out.device != self.device:
            self._note(f"a tensor is copied to the {out.device.type}")
        elif isinstance(out, Tensor) and out.device != self.device and _changes(func):
            self._note(f"{func} runs on the {out.device.type}")
        elif (
            isinstance(out, Tensor)
            and out.device == self.device
            and func in COPIES
            and any(x.device.type == "cpu" for x in given)
            and self.device.type != "cpu"
        ):
            self._note("a tensor is copied from the CPU")
        return out

    def _note(self, text: str) -> None:
        self.reason = self.reason or text


CPU = torch.device("cpu")
COPIES = (moves, torch.ops.aten.copy_.default)
by_index = torch.ops.aten.index.Tensor


def _changes(func: Any) -> bool:
    """Return whether an operator gives another result each time: it writes into a tensor or draws."""
    return writes(func) or torch.Tag.nondeterministic_seeded in func.tags


def _is_sized_by_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator waits for numbers that say how large its result is, as a mask's True values do."""
    if torch.Tag.dynamic_output_shape not in func.tags or kwargs.get("output_size") is not None:
        return False
    return func is not by_index or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def on_cuda(run: Callable[[], Any]) -> tuple[Any, Replay]:
    """Capture the kernels of a function as a CUDA graph and run them; return its result and the graph's replay."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = run()
    graph.replay()
    return result, graph.replay


def _aside(device: torch.device, run: Callable[[], Any]) -> Any:
    """Run a function on a separate stream: a step that is captured later must not wait for the default stream."""
    if device.type != "cuda":
        return run()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        result = run()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


def _make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let an optimizer read its learning rates from the device."""
    for group in optimizer.param_groups:
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True
        group["lr"] = torch.tensor(float(group["lr"]), device=device)


def _tensors(batches: list[Batch]) -> Iterator[Tensor]:
    for batch in batches:
        for _, leaf in leaves(tuple(batch)):
            if isinstance(leaf, Tensor):
                yield leaf


def _kind(batches: list[Batch], shares: list[Any]) -> Any:
    """Return what two steps must share to be one graph: the shapes of their batches and all numbers beside tensors."""
    parts = [
        (name, (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf))
        for batch in batches
        for name, leaf in leaves(tuple(batch))
    ]
    # a share that is a tensor differs from step to step
    return tuple(parts), tuple(id(share) if isinstance(share, Tensor) else share for share in shares)


def _copied(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.clone()
    if isinstance(part, dict):
        return type(part)({key: _copied(value) for key, value in part.items()})
    if isinstance(part, (tuple, list)):
        parts = [_copied(value) for value in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    return part
