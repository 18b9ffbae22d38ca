"""Replay files: weights, optimizers, batches and random states for running the steps before an alert again."""

from __future__ import annotations

import copy
import itertools
import os
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.attend import OptimizerSteps, Regularized
from headwise.files.durable import writing
from headwise.health.health_records import Alert, Record

FORMAT = 1
PLAIN = (bool, int, float, str, type(None))
SHARDED = (
    "keep= copies whole weights, but this model's weights are sharded over processes: leave keep out and save your own "
    "checkpoints"
)


class Keeper:
    """Recorder of the data that a replay of the last steps needs.

    It has the weights and optimizers of at least `last` steps ago, and the batch, random state and settings of each
    step since.

    Memory: two copies of weights and optimizers, on their device. Nothing waits for a device before an alert is
    written.

    Args:
        last: the number of steps before an alert that can be replayed; up to twice as many are recorded.
    """

    def __init__(self, model: nn.Module, regularized: Regularized | None, last: int, folder: Path) -> None:
        self.model, self.regularized, self.last, self.folder = model, regularized, last, folder
        self._optimizers: list[Optimizer] = []
        self._settings: list[list[dict[str, Any]]] = []
        self._steps: deque[dict[str, Any]] = deque()
        self._states: deque[dict[str, Any]] = deque(maxlen=2)
        self._random, self._drawn = random_state(), False
        # The step whose initial state has yet to be saved, and whether forwards reach the hook.
        self._due: int | None = None
        self._hooked = False
        self._hook = model.register_forward_pre_hook(self._before_forward)
        self._listening = OptimizerSteps(model, self._before_step)
        self._listening.listen()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of a watched model is not watched.
        return None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        # Taken here, after the data loader's draws; a compiled graph has the random state from the start of the step.
        if not module.training or self._drawn or torch.compiler.is_compiling():
            return
        self._random, self._drawn, self._hooked = random_state(), True, True
        if self._due is not None:
            # Everything that acts after a step has acted by now, in whatever order the loop calls it.
            self._save_state(self._due)

    def _before_step(self, number: int, optimizer: Optimizer) -> None:
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        # The settings include the current values of learning-rate schedules.
        self._settings.append([{k: v for k, v in g.items() if isinstance(v, PLAIN)} for g in optimizer.param_groups])

    def begin(self, step: int) -> None:
        """Start with the state before `step`, the first step of a new or resumed run."""
        self._steps.clear()
        self._states.clear()
        self._save_state(step)
        self._due = step

    def step(self, step: int, loss: Tensor | float | None, batch: Any) -> None:
        """Record a step that the optimizer has taken."""
        entry = {"step": step, "batch": plain(batch), "random": self._random, "settings": self._settings}
        entry["loss"] = loss.detach() if isinstance(loss, Tensor) else loss
        self._steps.append(entry)
        self._settings, self._drawn, self._random = [], False, random_state()

    def after(self, step: int) -> None:
        """Schedule saving the state after `step`, every `last` steps."""
        if (step + 1) % self.last == 0:
            self._due = step + 1
            if not self._hooked:
                self._save_state(step + 1)

    def _save_state(self, step: int) -> None:
        if any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters()):
            raise RuntimeError(SHARDED)
        self._due = None
        if self._states and self._states[-1]["step"] == step:
            self._states.pop()
        state: dict[str, Any] = {"step": step, "handle": None if self.regularized is None else self.regularized.state()}
        state["model"] = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        # Empty before the first step: a replay then starts with the optimizers as the training builds them.
        state["optimizers"] = [copy.deepcopy(optimizer.state_dict()) for optimizer in self._optimizers]
        self._states.append(state)
        while self._steps and self._steps[0]["step"] < self._states[0]["step"]:
            self._steps.popleft()

    def write(self, alerts: list[Alert], readings: Iterable[Record], settings: dict[str, Any]) -> Path:
        """Write the replay file for the step of the first alert and return its path."""
        step = alerts[0]["step"]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:08d}.pt"
        # another training or the user may have a file of this name
        numbers = itertools.count(2)
        while os.path.lexists(path):
            path = self.folder / f"step_{step:08d}-{next(numbers)}.pt"
        content = {
            "format": FORMAT,
            "state": self._states[0],
            "steps": list(self._steps),
            "alerts": alerts,
            "readings": list(readings),
            "watch": settings,
            "torch": str(torch.__version__),
        }
        with writing(path, flush=False) as stream:
            torch.save(_on_cpu(content), stream)
        return path

    def stop(self) -> None:
        """Stop recording and release what was recorded."""
        self._hook.remove()
        self._listening.stop()
        self._steps.clear()
        self._states.clear()


def read_replay(path: Path) -> dict[str, Any]:
    """Return the content of a replay file, without executing code from it.

    Raises:
        ValueError: if there is no such file, or it is not a replay file of this version.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: pass a file that headwise.watch(..., keep=N) wrote") from None
    except Exception as error:
        raise ValueError(
            f"{path} is not a replay file of headwise.watch(..., keep=N): {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a replay file of this version of headwise, which reads format {FORMAT}: use the "
            "version that "
            "wrote it"
        )
    return content


def plain(batch: Any) -> Any:
    """Return a copy of the value of `batch=` for a replay file: numbers, texts, tensors, and lists and dicts of these.

    Raises:
        TypeError: if it contains an object of another type.
    """
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, PLAIN):
        return batch
    if isinstance(batch, list | tuple):
        return [plain(item) for item in batch]
    if isinstance(batch, dict):
        return {str(key): plain(value) for key, value in batch.items()}
    raise TypeError(
        "batch= names the examples of a step by numbers, texts or tensors, or lists or dicts of them, got "
        f"{type(batch).__name__}"
    )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


def random_state() -> dict[str, Any]:
    """Return the states of the generators of torch and Python, of CUDA if it is initialized, and numpy if imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the random generators to a state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.asarray(keys, dtype=numpy.uint32), *rest))


@contextmanager
def random_left_alone() -> Iterator[None]:
    """Restore the random generators at the end."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
