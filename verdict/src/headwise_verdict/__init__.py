"""Verdicts about training runs of any framework: paired tests, intervals, reports and decisions. Imports no torch.

This is the door: what other packages take from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise_verdict.files.errors import StudyError as StudyError
    from headwise_verdict.judging.from_python import judge as judge
    from headwise_verdict.reporting import write as write

__version__ = "0.2.0"

# what others use, each from its module, imported on first use
_DOOR = {
    # decide on one change from a table of runs
    "judge": "judging.from_python",
    # write the report of a folder
    "write": "reporting",
    # an error with cause and remedy, printed without a traceback
    "StudyError": "files.errors",
}
__all__ = sorted(_DOOR)


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"module 'headwise_verdict' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise_verdict.{_DOOR[name]}"), name)
