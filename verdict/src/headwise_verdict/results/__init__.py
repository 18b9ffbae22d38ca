"""Results: what runs and studies leave on disk, and their statistics.

This is a door: the records and files that a training writes, and reads back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise_verdict.files.doors import door

if TYPE_CHECKING:
    from headwise_verdict.results.differences import why_no_pair as why_no_pair
    from headwise_verdict.results.records import Apart as Apart
    from headwise_verdict.results.records import AxisRecord as AxisRecord
    from headwise_verdict.results.records import Claim as Claim
    from headwise_verdict.results.records import ClaimTest as ClaimTest
    from headwise_verdict.results.records import Divergence as Divergence
    from headwise_verdict.results.records import EpochLine as EpochLine
    from headwise_verdict.results.records import OutcomeNames as OutcomeNames
    from headwise_verdict.results.records import Premise as Premise
    from headwise_verdict.results.records import RunResult as RunResult
    from headwise_verdict.results.records import StoredRecord as StoredRecord
    from headwise_verdict.results.records import StudyRecord as StudyRecord
    from headwise_verdict.results.records import declared_outcomes as declared_outcomes
    from headwise_verdict.results.run_files import RunFiles as RunFiles
    from headwise_verdict.results.run_files import StudyFiles as StudyFiles

# each name with its module, imported on first use
_DOOR = {
    # the description of a study: arms, seeds, outcomes, claims
    "StudyRecord": "records",
    # the arms that one sweep made
    "AxisRecord": "records",
    # how a run ended, and its outcomes
    "RunResult": "records",
    # the outcomes of one epoch
    "EpochLine": "records",
    # the steps of an epoch whose time includes other work
    "Apart": "records",
    # where and why a run diverged
    "Divergence": "records",
    # the names of outcomes that a run may have whatever its task measures
    "OutcomeNames": "records",
    # a statement of a source
    "Claim": "records",
    # what would have to be seen for it
    "ClaimTest": "records",
    # what must hold for a claim to be tested at all
    "Premise": "records",
    # what each record on disk derives from
    "StoredRecord": "records",
    # the files of a run in its folder
    "RunFiles": "run_files",
    # the files of a study in its folder
    "StudyFiles": "run_files",
    # outcomes as users declare them: accuracy:higher
    "declared_outcomes": "records",
    # why two runs of a seed are not paired
    "why_no_pair": "differences",
}
__getattr__, __all__ = door(__name__, _DOOR)
