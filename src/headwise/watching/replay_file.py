"""Replay file: what it takes to run the steps before an alert again, kept while a model trains and written when one
comes."""

from __future__ import annotations

import copy
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

from headwise.files.health_records import Alert, Record
from headwise.regularizing.handle import Regularized
from headwise.regularizing.optimizer_steps import OptimizerSteps

FORMAT = 1
PLAIN = (bool, int, float, str, type(None))
SHARDED = (
    "keep= holds whole weights, and this model's are sharded over processes: leave keep out, and save checkpoints of "
    "your own"
)


class Keeper:
    """Keeps weights and optimizers of at least `last` steps ago, and of each step since its batch, random state and
    settings.

    Memory: two copies of weights and optimizers, on their device. Nothing waits for a device before an alert is
    written.

    Args:
        last: steps that can be run again before an alert; up to twice as many are kept.
        folder: where files are written.
    """

    def __init__(self, model: nn.Module, regularized: Regularized | None, last: int, folder: Path) -> None:
        self.model, self.regularized, self.last, self.folder = model, regularized, last, folder
        self._optimizers: list[Optimizer] = []
        self._settings: list[list[dict[str, Any]]] = []
        self._steps: deque[dict[str, Any]] = deque()
        self._states: deque[dict[str, Any]] = deque(maxlen=2)
        self._random, self._drawn = random_state(), False
        # the step whose beginning is to be kept, and whether forwards are seen
        self._due: int | None = None
        self._seen = False
        self._hook = model.register_forward_pre_hook(self._before_forward)
        self._listening = OptimizerSteps(model, self._before_step)
        self._listening.listen()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of a watched model is not watched.
        return None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        # what a loader draws comes before; a compiled graph cannot tell, and gets the state that the step began with
        if not module.training or self._drawn or torch.compiler.is_compiling():
            return
        self._random, self._drawn, self._seen = random_state(), True, True
        if self._due is not None:
            # here all that acts after a step has acted, whatever the loop calls first
            self._keep_state(self._due)

    def _before_step(self, number: int, optimizer: Optimizer) -> None:
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        # as a schedule left them
        self._settings.append([{k: v for k, v in g.items() if isinstance(v, PLAIN)} for g in optimizer.param_groups])

    def begin(self, step: int) -> None:
        """Keep the state that a step begins with, the first one or that of a resumed run."""
        self._steps.clear()
        self._states.clear()
        self._keep_state(step)
        self._due = step

    def step(self, step: int, loss: Tensor | float | None, batch: Any) -> None:
        """Note a step that was taken."""
        entry = {"step": step, "batch": plain(batch), "random": self._random, "settings": self._settings}
        entry["loss"] = loss.detach() if isinstance(loss, Tensor) else loss
        self._steps.append(entry)
        self._settings, self._drawn, self._random = [], False, random_state()

    def after(self, step: int) -> None:
        """Ask for the state after a step where enough steps went by."""
        if (step + 1) % self.last == 0:
            self._due = step + 1
            if not self._seen:
                self._keep_state(step + 1)

    def _keep_state(self, step: int) -> None:
        if any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters()):
            raise RuntimeError(SHARDED)
        self._due = None
        if self._states and self._states[-1]["step"] == step:
            self._states.pop()
        state: dict[str, Any] = {"step": step, "handle": None if self.regularized is None else self.regularized.state()}
        state["model"] = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        # before the first step there is none: the training's own begins
        state["optimizers"] = [copy.deepcopy(one.state_dict()) for one in self._optimizers]
        self._states.append(state)
        while self._steps and self._steps[0]["step"] < self._states[0]["step"]:
            self._steps.popleft()

    def write(self, alerts: list[Alert], readings: Iterable[Record], settings: dict[str, Any]) -> Path:
        """Write the file of an alert's step and return where it lies."""
        step = alerts[0]["step"]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:08d}.pt"
        kept = {
            "format": FORMAT,
            "state": self._states[0],
            "steps": list(self._steps),
            "alerts": alerts,
            "readings": list(readings),
            "watch": settings,
            "torch": str(torch.__version__),
        }
        part = path.with_suffix(".part")
        torch.save(_on_cpu(kept), part)
        part.replace(path)
        return path

    def stop(self) -> None:
        """Keep nothing more."""
        self._hook.remove()
        self._listening.stop()
        self._steps.clear()
        self._states.clear()


def read_replay(path: Path) -> dict[str, Any]:
    """Read a replay file; no code of it is executed.

    Raises:
        ValueError: where it is none, or of another version.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except Exception as error:
        raise ValueError(
            f"{path} is no replay file of headwise.watch(..., keep=N): {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no replay file of this version of headwise, which reads format {FORMAT}")
    return found


def plain(batch: Any) -> Any:
    """Return what names a batch as a file holds it: numbers, texts, tensors, and lists and dicts of these.

    Raises:
        TypeError: where it is something else.
    """
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, PLAIN):
        return batch
    if isinstance(batch, list | tuple):
        return [plain(one) for one in batch]
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
        return {key: _on_cpu(one) for key, one in value.items()}
    return [_on_cpu(one) for one in value] if isinstance(value, list) else value


def random_state() -> dict[str, Any]:
    """Return the state of the generators of torch, Python and numpy, where it was imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators back to a state."""
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
    """Leave the generators as they were."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
