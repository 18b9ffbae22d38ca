"""Verdicts about training runs of any framework: paired tests, intervals, reports and decisions. Imports no torch.

This is the door: what other packages take from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise_verdict.files.doors import door

if TYPE_CHECKING:
    from headwise_verdict.cli import add_judge as add_judge
    from headwise_verdict.files.errors import StudyError as StudyError
    from headwise_verdict.judging.assertion import assert_not_worse as assert_not_worse
    from headwise_verdict.judging.from_python import judge as judge
    from headwise_verdict.judging.pairs import PairOfRuns as PairOfRuns
    from headwise_verdict.reporting import write as write
    from headwise_verdict.reporting.command import report as report
    from headwise_verdict.reporting.command import show_report as show_report
    from headwise_verdict.reporting.study_result import StudyResult as StudyResult
    from headwise_verdict.reporting.table_rows import Row as Row
    from headwise_verdict.reporting.table_rows import figure_of as figure_of
    from headwise_verdict.reporting.table_rows import is_missing as is_missing
    from headwise_verdict.reporting.table_rows import read_rows as read_rows
    from headwise_verdict.results.joint_flips import seeds_for_a_verdict as seeds_for_a_verdict
    from headwise_verdict.results.json_answer import results_of as results_of

__version__ = "0.2.0"

# what others use, each from its module, imported on first use
_DOOR = {
    # decide on one change from a table of runs
    "judge": "judging.from_python",
    # fail a test where a candidate is not shown to be no worse
    "assert_not_worse": "judging.assertion",
    # two runs of a seed, which `judge --script` trains until they decide
    "PairOfRuns": "judging.pairs",
    # add the command judge to a command line
    "add_judge": "cli",
    # rebuild reports of folders, or report a table
    "report": "reporting.command",
    # write the report of a folder
    "write": "reporting",
    # write the report of a folder, and print its answer
    "show_report": "reporting.command",
    # the answers of folders as --json prints them
    "results_of": "results.json_answer",
    # the result of a study in its folder
    "StudyResult": "reporting.study_result",
    # the fewest seeds that can decide a difference
    "seeds_for_a_verdict": "results.joint_flips",
    # a row of a table of any tool
    "Row": "reporting.table_rows",
    # the rows of such a table
    "read_rows": "reporting.table_rows",
    # the number in a cell
    "figure_of": "reporting.table_rows",
    # whether a cell holds none
    "is_missing": "reporting.table_rows",
    # an error with cause and remedy, printed without a traceback
    "StudyError": "files.errors",
}
__getattr__, __all__ = door(__name__, _DOOR)
