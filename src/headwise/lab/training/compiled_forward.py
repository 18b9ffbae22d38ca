"""Compiled steps: a batch's forward, loss and backward as one graph of torch.compile, for `--compile step`.

Everything else in a step runs as without: penalties are added, gradients clipped, the optimizer and the methods act.
Such a step is not captured as a CUDA graph: torch runs no compiled code under the mode that looks for obstacles.
Draws are those of the other loop, and its numbers those but for rounding. A graph is made for each size of batches and
never for several, because which of two graphs serves a batch would else depend on where a run resumed.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.borders import compile_errors
from headwise.files.provenance import hardware
from headwise.lab.experiments.task import Task
from headwise.lab.training.batches import run_model
from headwise_verdict import StudyError
from headwise_verdict.files import data_folder

# of a task, its model, inputs and targets, to the output and the loss
Forward = Callable[[Task, nn.Module, Any, Any], tuple[Any, Tensor]]
# the folder of compiled code inside the user's cache, with one for each kind of processor
FOLDER = "compiled"
# a line of a trace
PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')


def forward_and_loss(task: Task, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
    """Return the output of the model and the task's loss of it."""
    output = run_model(model, inputs)
    return output, task.loss(output, targets)


class CompiledForward:
    """`forward_and_loss` as one graph with its backward, one for each size of batches.

    Args:
        backend: of torch.compile; tests also use one that fuses nothing, and so rounds as the other loop.

    Raises:
        StudyError: in a call, if torch cannot compile it.
    """

    def __init__(self, backend: str = "inductor") -> None:
        _keep_code()
        self._sizes: set[int] = set()
        # what earlier runs compiled counts towards torch's limit of graphs for one function
        torch.compiler.reset()
        # a fitted model gives torch its attention back when it is deleted, which must not happen during a trace
        gc.collect()
        # inductor's own numbers are others than those of torch's generators
        options: Any = {"fallback_random": True} if backend == "inductor" else None
        self._run: Forward = torch.compile(
            forward_and_loss, fullgraph=True, dynamic=False, backend=backend, options=options
        )

    def is_first(self, sizes: Iterable[int]) -> bool:
        """Return whether a step is the first with a batch of one of these sizes, and so compiles it."""
        new = set(sizes) - self._sizes
        self._sizes |= new
        return bool(new)

    def told(self) -> str:
        """Return how the steps were taken, for the report."""
        return "compiled"

    def __call__(self, task: Task, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
        """Return output and loss of a batch."""
        try:
            return self._run(task, model, inputs, targets)
        except compile_errors() as error:
            raise StudyError(f"--compile step: torch.compile fails: {_reason(error)}. Leave --compile out.") from error


def compiled(choice: str, task: Task, lengths: Tensor | None, processes: int) -> CompiledForward | None:
    """Return the compiled forward of a run's training steps, or None, by the choice step or off.

    Raises:
        StudyError: if steps are to be compiled and cannot be.
    """
    if choice == "off":
        return None
    if processes > 1:
        raise StudyError("--compile step: several processes train one model. Leave --compile or --processes out.")
    if lengths is not None:
        raise StudyError(
            f"--compile step: the batches of {type(task).__name__} differ in length, and each length would be compiled "
            "for itself. Leave --compile out."
        )
    return CompiledForward()


def _keep_code() -> None:
    """Let torch keep compiled code in the user's cache, where later runs and arms find it, unless a folder is set."""
    # torch does not tell apart what it compiled for several instruction sets, and a home may serve several machines
    kind = hashlib.sha256(hardware()["processor"].encode()).hexdigest()[:8]
    # RuntimeError: there is no home directory; torch then keeps it among temporary files
    with suppress(RuntimeError):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(data_folder(None) / FOLDER / kind))


def _reason(error: Exception) -> str:
    """Return the first line of a message, and the last line of code that it names, if any."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    places = PLACE.findall(str(error))
    if not places:
        return first.rstrip(".")
    file, line, function = places[-1]
    return f"{first.rstrip('.')} (line {line} of {Path(file).name}, in {function})"
