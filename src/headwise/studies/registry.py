"""The built-in studies: found by their files, imported one at a time."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType

import headwise.studies
from headwise.files.errors import StudyError

# what the studies share, and this file
NO_STUDIES = ("data", "tasks", "registry")


@dataclass(frozen=True)
class BuiltIn:
    """Give the built-in studies to the command, which knows none by itself."""

    @property
    def names(self) -> tuple[str, ...]:
        """List the studies, without importing any of them."""
        return tuple(study_names())

    def load(self, name: str) -> ModuleType:
        """Import the module of a study."""
        return load_study(name)


def study_names() -> list[str]:
    """List the built-in studies, without importing any of them."""
    modules = (module.name for module in pkgutil.iter_modules(headwise.studies.__path__))
    return sorted(name.replace("_", "-") for name in modules if name not in NO_STUDIES)


def load_study(name: str) -> ModuleType:
    """Import the module of a built-in study: it holds `STUDY`, or `TITLE` and `run` for a study of findings."""
    if name not in study_names():
        raise StudyError(f"there is no study {name!r}. Studies: {', '.join(study_names())}; or give --task FILE:CLASS.")
    return importlib.import_module(f"headwise.studies.{name.replace('-', '_')}")
