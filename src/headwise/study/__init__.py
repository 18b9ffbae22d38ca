"""Compare methods on a task: fair by construction, resumable, repeatable.

`Task` is what a user's own file subclasses; the rest serves `headwise compare`.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["Study", "StudyError", "Task", "VisionTransformer", "compare"]

_HOME = {
    "Study": "headwise.study.study",
    "StudyError": "headwise.study.errors",
    "Task": "headwise.study.task",
    "VisionTransformer": "headwise.study.models",
    "compare": "headwise.study.compare",
}


def __getattr__(name: str):
    """Resolve a public name on first use, so that importing this package stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'headwise.study' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
