"""The built-in studies: found by their files, imported one at a time."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import headwise.studies
from headwise.study.errors import StudyError


def study_names() -> list[str]:
    """List the built-in studies, without importing any of them."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(headwise.studies.__path__))


def load_study(name: str) -> ModuleType:
    """Import the module of a built-in study: it holds `STUDY`, or `TITLE` and `run` for a study of findings."""
    if name not in study_names():
        raise StudyError(f"there is no study {name!r}. Studies: {', '.join(study_names())}; or give --task FILE:CLASS.")
    return importlib.import_module(f"headwise.studies.{name.replace('-', '_')}")
