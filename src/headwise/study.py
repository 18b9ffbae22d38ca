"""The names that a user's own study file imports: `Task`, `Study`, their parts, `compare` and their error."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwise.files.optional_imports import needing

if TYPE_CHECKING:
    from headwise.experiments.evaluation import Batch as Batch
    from headwise.experiments.evaluation import Evaluation as Evaluation
    from headwise.experiments.evaluation import Metric as Metric
    from headwise.experiments.evaluation import Rows as Rows
    from headwise.experiments.study import Scale as Scale
    from headwise.experiments.study import Study as Study
    from headwise.experiments.subject import Phase as Phase
    from headwise.experiments.task import Task as Task
    from headwise.files.data_set import DataSet as DataSet
    from headwise.files.errors import StudyError as StudyError
    from headwise.results.records import Claim as Claim
    from headwise.results.records import ClaimTest as ClaimTest
    from headwise.results.records import Premise as Premise
    from headwise.studies.from_python import compare as compare
    from headwise.studies.vision_transformer import VisionTransformer as VisionTransformer

# the rooms of the names
_ROOMS = {
    "experiments.evaluation": "Batch Evaluation Metric Rows",
    "experiments.study": "Scale Study",
    "experiments.subject": "Phase",
    "experiments.task": "Task",
    "files.data_set": "DataSet",
    "files.errors": "StudyError",
    "results.records": "Claim ClaimTest Premise",
    "studies.from_python": "compare",
    "studies.vision_transformer": "VisionTransformer",
}
_HOME = {name: f"headwise.{room}" for room, names in _ROOMS.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Return a public name, imported on first use; raise ImportError with the extra if a library is missing."""
    if name not in _HOME:
        raise AttributeError(f"module 'headwise.study' has no attribute {name!r}")
    with needing(f"headwise.study.{name}", "study"):
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
