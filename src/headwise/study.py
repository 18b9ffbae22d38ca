"""What a user's own study file imports: `Task`, `Study`, their parts, `VisionTransformer`, `compare` and the error they raise."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwise.files.optional_imports import needing

if TYPE_CHECKING:
    from headwise.comparing.batch import Batch as Batch
    from headwise.comparing.compare import compare as compare
    from headwise.comparing.evaluation import Evaluation as Evaluation
    from headwise.comparing.metric import Metric as Metric
    from headwise.comparing.metric import Rows as Rows
    from headwise.comparing.phase import Phase as Phase
    from headwise.comparing.study import Study as Study
    from headwise.comparing.task import Task as Task
    from headwise.files.errors import StudyError as StudyError
    from headwise.studies.tasks.vision_transformer import VisionTransformer as VisionTransformer

__all__ = [
    "Batch",
    "Evaluation",
    "Metric",
    "Phase",
    "Rows",
    "Study",
    "StudyError",
    "Task",
    "VisionTransformer",
    "compare",
]

_HOME = {
    "Batch": "headwise.comparing.batch",
    "Evaluation": "headwise.comparing.evaluation",
    "Metric": "headwise.comparing.metric",
    "Phase": "headwise.comparing.phase",
    "Rows": "headwise.comparing.metric",
    "Study": "headwise.comparing.study",
    "StudyError": "headwise.files.errors",
    "Task": "headwise.comparing.task",
    "VisionTransformer": "headwise.studies.tasks.vision_transformer",
    "compare": "headwise.comparing.compare",
}


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use, so that importing this module stays light; raise ImportError naming the extra."""
    if name not in _HOME:
        raise AttributeError(f"module 'headwise.study' has no attribute {name!r}")
    with needing(f"headwise.study.{name}", "study"):
        return getattr(import_module(_HOME[name]), name)
