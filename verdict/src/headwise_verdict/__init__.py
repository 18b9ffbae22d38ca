"""Verdicts about training runs of any framework: paired tests, intervals, reports and decisions. Imports no torch.

This is the door: what other packages take from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise_verdict.files.durable import read_json as read_json
    from headwise_verdict.files.durable import read_lines as read_lines
    from headwise_verdict.files.errors import StudyError as StudyError
    from headwise_verdict.files.errors import explain as explain
    from headwise_verdict.files.errors import is_for_users as is_for_users
    from headwise_verdict.judging.from_python import judge as judge
    from headwise_verdict.reporting import write as write
    from headwise_verdict.results.records import Claim as Claim
    from headwise_verdict.results.records import ClaimTest as ClaimTest
    from headwise_verdict.results.records import Divergence as Divergence
    from headwise_verdict.results.records import EpochLine as EpochLine
    from headwise_verdict.results.records import Premise as Premise
    from headwise_verdict.results.records import RunResult as RunResult
    from headwise_verdict.results.records import StudyRecord as StudyRecord

__version__ = "0.2.0"

# what others use, each from its module, imported on first use
_DOOR = {
    # decide on one change from a table of runs
    "judge": "judging.from_python",
    # write the report of a folder
    "write": "reporting",
    # an error with cause and remedy, printed without a traceback
    "StudyError": "files.errors",
    # an error of the file system as such an error
    "explain": "files.errors",
    # whether an error is printed without a traceback
    "is_for_users": "files.errors",
    # a JSON file, or None if it is absent or torn
    "read_json": "files.durable",
    # the records of a file of JSON lines
    "read_lines": "files.durable",
    # the description of a study: arms, seeds, outcomes, claims
    "StudyRecord": "results.records",
    # how a run ended, and its outcomes
    "RunResult": "results.records",
    # the outcomes of one epoch
    "EpochLine": "results.records",
    # where and why a run diverged
    "Divergence": "results.records",
    # a statement of a source
    "Claim": "results.records",
    # what would have to be seen for it
    "ClaimTest": "results.records",
    # what must hold for a claim to be tested at all
    "Premise": "results.records",
}
__all__ = sorted(_DOOR)


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"module 'headwise_verdict' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise_verdict.{_DOOR[name]}"), name)
