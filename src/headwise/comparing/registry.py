"""The built-in studies: found by their files, imported one at a time."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import headwise.studies
from headwise.files.errors import StudyError


def study_names() -> list[str]:
    """List the built-in studies, without importing any of them."""
    modules = (module.name for module in pkgutil.iter_modules(headwise.studies.__path__))
    # `tasks` holds what the studies share
    return sorted(name.replace("_", "-") for name in modules if name != "tasks")


def load_study(name: str) -> ModuleType:
    """Import the module of a built-in study: it holds `STUDY`, or `TITLE` and `run` for a study of findings."""
    if name not in study_names():
        raise StudyError(f"there is no study {name!r}. Studies: {', '.join(study_names())}; or give --task FILE:CLASS.")
    return importlib.import_module(f"headwise.studies.{name.replace('-', '_')}")
