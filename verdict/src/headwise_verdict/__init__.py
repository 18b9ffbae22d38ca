"""Verdicts about training runs of any framework: paired tests, intervals, reports and decisions. Imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise_verdict.judging.from_python import judge as judge
    from headwise_verdict.reporting import write as write

__version__ = "0.2.0"

# what others use, each from its module, imported on first use
_DOOR = {
    "judge": "headwise_verdict.judging.from_python",
    "write": "headwise_verdict.reporting",
}
__all__ = sorted(_DOOR)


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"module 'headwise_verdict' has no attribute {name!r}")
    return getattr(importlib.import_module(_DOOR[name]), name)
