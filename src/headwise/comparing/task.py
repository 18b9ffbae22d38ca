"""Task: a model factory, data, a loss and a metric. Its fields are its settings and part of every run's identity."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from torch import Tensor, nn

from headwise.files.errors import StudyError


class Task(BaseModel, ABC):
    """Describe what is learned; subclass it in one file and pass `--task file.py:Class`.

    Fields are settings: whatever changes a number belongs in a field. `model` and `data` must be written, the rest
    has defaults for classification. Tensors of `data` have the examples in their first dimension.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    title: ClassVar[str] = ""
    question: ClassVar[str] = "Which attention regularizers beat the plain model, paired by seed?"
    metric_name: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    unit: ClassVar[str] = "%"
    # True records the test split after every epoch too; nothing is ever chosen by it
    test_curve: ClassVar[bool] = False

    epochs: int = Field(10, ge=1)
    batch_size: int = Field(256, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    train_size: int | None = Field(None, ge=1, description="training examples, drawn anew for each seed; None: all")
    test_size: int | None = Field(None, ge=1, description="test examples, the same for all runs; None: all")
    held_out: int = Field(0, ge=0, description="training examples kept for tuning trials when `data` has no validation")
    evaluation_batch_size: int = Field(1000, ge=1)

    _folder: Path | None = PrivateAttr(None)

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model; torch's generator is seeded before, so that all methods of a seed start equal."""

    @abstractmethod
    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        """Give (inputs, targets) of "train", "validation" or "test"; None for a validation that does not exist."""

    def batch(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Prepare the inputs of one batch; augmentation draws from `generator`, which is None in evaluation."""
        return inputs

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss of a batch, in nats for cross entropy."""
        return nn.functional.cross_entropy(output, targets)

    def metric(self, output: Tensor, targets: Tensor) -> Tensor:
        """Give the mean metric of a batch; accuracy lies in [0, 1]."""
        return (output.argmax(-1) == targets).float().mean()

    def files(self) -> list[Path]:
        """List the files the data comes from: their content is part of every run's identity."""
        return []

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Make the data ready once before the runs start, for example by a download."""

    def located(self, folder: Path | None) -> Task:
        """Give the task that finds its data in `folder` (where data lies changes no number)."""
        self._folder = folder
        return self

    @property
    def folder(self) -> Path | None:
        """Name the folder given by `--data` or HEADWISE_DATA."""
        return self._folder


def load_task(text: str) -> type[Task]:
    """Load a task class from "file.py:Class" or "package.module:Class"."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise StudyError(f"--task {text!r} names no class. Write FILE:CLASS, for example my_task.py:MyTask.")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_of_name(place)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task]
        raise StudyError(
            f"{place} has no task {name!r}; a task subclasses headwise.study.Task. "
            f"Tasks there: {', '.join(classes) or 'none'}."
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise StudyError(f"task {name} lacks {', '.join(f'{m}()' for m in missing)}. Add it to {place}.")
    return found


def build_task(task: type[Task], settings: dict) -> Task:
    """Build a task with settings, naming each setting that is wrong."""
    try:
        return task(**settings)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise StudyError(f"{task.__name__} does not take these settings: {wrong}.") from error


def source_digest(path: Path) -> str:
    """Give the SHA-256 of a user's task file: an edited task is another task."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_digests(task: Task) -> dict[str, str]:
    """Give the SHA-256 of each file the task's data comes from, by name."""
    digests = {}
    for path in task.files():
        if not path.is_file():
            raise StudyError(
                f"{type(task).__name__} reads {path}, which does not exist. Check the setting that names it."
            )
        with open(path, "rb") as stream:
            digests[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _module_of_name(place: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise StudyError(f"--task: {place} is no Python file. Give FILE.py:CLASS, or package.module:CLASS.")
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise StudyError(
            f"--task: the module {place} could not be imported ({type(error).__name__}: {error}). "
            "Give FILE.py:CLASS, or a module that Python finds from here."
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise StudyError(f"--task: there is no file {path}. Give the path of the Python file that defines the task.")
    name = f"headwise_task_{path.stem}_{source_digest(path)[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise StudyError(f"{path} could not be loaded: {type(error).__name__}: {error}. Correct the file.") from error
    return module
