"""The source of a task: loading its class from a file or module, building it, and digests of the files it reads."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headwise.files.entry_points import entry_points
from headwise.files.errors import suggest
from headwise.lab.experiments.subject import Subject, checkpoint_files
from headwise.lab.experiments.task import Task
from headwise_verdict import StudyError


def source_file(place: str) -> Path | None:
    """Return the file whose text is part of a task's identity; None for tasks of this package."""
    module, _, _ = place.rpartition(":")
    if module.endswith(".py"):
        return Path(module)
    if module.partition(".")[0] == "headwise":
        return None
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec and spec.origin else None


AnySubject = TypeVar("AnySubject", bound=Subject)


def installed_task(name: str) -> str | None:
    """Return the "package.module:Class" of an installed package's task, or None if none has this name."""
    point = entry_points("headwise.tasks").get(name)
    return point.value if point is not None else None


def load_task(text: str) -> type[Task]:
    """Return the task class for "file.py:Class", "package.module:Class" or the name of an installed task."""
    text = installed_task(text) or text
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        named = ", ".join(entry_points("headwise.tasks"))
        raise StudyError(
            f"--task {text!r} names no class. Write FILE:CLASS, for example my_task.py:MyTask"
            + (f", or the name of an installed task: {named}." if named else ".")
        )
    module = module_of_file(Path(place)) if place.endswith(".py") else _module_of_name(place)
    task = getattr(module, name, None)
    if not (isinstance(task, type) and issubclass(task, Task)):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task]
        raise StudyError(
            f"{place} has no task {name!r}; a task subclasses headwise.study.Task. "
            f"Tasks there: {', '.join(classes) or 'none'}."
        )
    missing = sorted(getattr(task, "__abstractmethods__", ()))
    if missing:
        raise StudyError(f"task {name} lacks {', '.join(f'{m}()' for m in missing)}. Add it to {place}.")
    return task


def build_task(task: type[AnySubject], settings: dict[str, Any]) -> AnySubject:
    """Return the task with settings; raise StudyError naming each setting that is wrong."""
    try:
        return task(**settings)
    except ValidationError as error:
        wrong = "; ".join(_wrong(task, entry) for entry in error.errors())
        raise StudyError(f"{task.__name__} does not take these settings: {wrong.removesuffix('.')}.") from error


def _wrong(task: type[Subject], error: ErrorDetails) -> str:
    place, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"there is no such setting.{suggest(place, list(task.model_fields))}"
    # errors about several settings together have no location
    return f"{place}: {message}" if place else message


def source_digest(path: Path) -> str:
    """Return the SHA-256 of a user's task file: an edited task is another task."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_read(task: Subject) -> list[Path]:
    """Return the files that a task reads, each once: its data, and the checkpoints that its phases start from."""
    starts = [path for phase in task.phases() if phase.folder for path in checkpoint_files(phase.folder)]
    return list(dict.fromkeys((*task.files(), *starts)))


def file_digests(task: Subject) -> dict[str, str]:
    """Return the SHA-256 of each file that the task reads, by name; the second of equal names becomes "name (2)"."""
    digests: dict[str, str] = {}
    for path in files_read(task):
        if not path.is_file():
            raise StudyError(
                f"{type(task).__name__} reads {path}, which does not exist. Check the setting that names it."
            )
        name, number = path.name, 1
        while name in digests:
            number += 1
            name = f"{path.name} ({number})"
        with open(path, "rb") as stream:
            digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _module_of_name(place: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise StudyError(f"--task: {place} is not a Python file. Give FILE.py:CLASS, or package.module:CLASS.")
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise StudyError(
            f"--task: the module {place} could not be imported ({type(error).__name__}: {error}). "
            "Give FILE.py:CLASS, or a module that Python finds from here."
        ) from error


def module_of_file(path: Path) -> ModuleType:
    """Return the module of a user's file, loaded once; raise StudyError if there is none or it fails."""
    if not path.is_file():
        raise StudyError(f"there is no file {path}. Give the path of the Python file that defines the task or study.")
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
        cause = _missing_type(error) or f"{type(error).__name__}: {error}. Correct the file."
        raise StudyError(f"{path} could not be loaded: {cause}") from error
    return module


def _missing_type(error: Exception) -> str | None:
    """Return a message naming the setting without a type, if that is the error; pydantic speaks of fields."""
    named = re.search(r"[`'](\w+)", str(error))
    if getattr(error, "code", None) not in ("model-field-overridden", "model-field-missing-annotation") or not named:
        return None
    known = Task.model_fields.get(named[1])
    if known is None:
        return (
            f"the setting {named[1]} has no type: write {named[1]}: int = ..., or ClassVar[...] if it is not a setting."
        )
    kind = known.annotation
    written = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return f"the setting {named[1]} has no type: write {named[1]}: {written} = ..."
