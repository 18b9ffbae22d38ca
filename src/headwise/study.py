"""The names that a user's own study file imports: `Task`, `Study`, their parts, `compare` and their error."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwise.files.optional_imports import needing

if TYPE_CHECKING:
    from headwise.lab.experiments.evaluation import Batch as Batch
    from headwise.lab.experiments.evaluation import Evaluation as Evaluation
    from headwise.lab.experiments.evaluation import Metric as Metric
    from headwise.lab.experiments.evaluation import Rows as Rows
    from headwise.lab.experiments.study import Scale as Scale
    from headwise.lab.experiments.study import Study as Study
    from headwise.lab.experiments.subject import Phase as Phase
    from headwise.lab.experiments.task import Task as Task
    from headwise.lab.files.data_set import DataSet as DataSet
    from headwise.lab.studies.from_python import compare as compare
    from headwise.lab.studies.vision_transformer import VisionTransformer as VisionTransformer
    from headwise_verdict import StudyError as StudyError
    from headwise_verdict.results import Claim as Claim
    from headwise_verdict.results import ClaimTest as ClaimTest
    from headwise_verdict.results import Premise as Premise

# the rooms of the names
_ROOMS = {
    "headwise.lab.experiments.evaluation": "Batch Evaluation Metric Rows",
    "headwise.lab.experiments.study": "Scale Study",
    "headwise.lab.experiments.subject": "Phase",
    "headwise.lab.experiments.task": "Task",
    "headwise.lab.files.data_set": "DataSet",
    "headwise_verdict.files.errors": "StudyError",
    "headwise_verdict.results.records": "Claim ClaimTest Premise",
    "headwise.lab.studies.from_python": "compare",
    "headwise.lab.studies.vision_transformer": "VisionTransformer",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Return a public name, imported on first use; raise ImportError with the extra if a library is missing."""
    if name not in _HOME:
        raise AttributeError(f"module 'headwise.study' has no attribute {name!r}")
    with needing(f"headwise.study.{name}", "study"):
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
