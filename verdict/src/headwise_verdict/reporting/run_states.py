"""The states of runs in tables of trackers, tuners and schedulers: which of them mean that a run finished.

Only a word that is known to mean success is believed. Every other state leaves a run without figures.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# columns that describe a run's settings or figures, whatever their last word is
NOT_STATES = ("params.", "params_", "config.", "config/", "user_attrs_", "metrics.", "summary.", "summary/")
STATE_COLUMN = re.compile(
    r"(?:.*[./])?(?:(?:run|trial|job|task|pod|experiment)[ _-]?)?(?:status|state)|(?:.*[./])?status[./]phase",
    re.IGNORECASE,
)
# columns of true and false whose name is a state, as Neptune's `sys/failed`; `done` is false in Ray's finished trials
FLAG_COLUMN = re.compile(
    r"(?:.*[./])?(?:is_)?(finished|completed?|failed|crashed|killed|pruned|interrupted|diverged)", re.IGNORECASE
)
EXIT_COLUMN = re.compile(r"(?:.*[./])?(?:exit|return)[ _-]?code", re.IGNORECASE)

# letters only: the words of W&B, MLflow, Optuna, Lightning, Slurm, Kubernetes and others
FINISHED = frozenset("finished complete completed succeeded success successful done passed published cd".split())
UNFINISHED = frozenset(
    """
    unfinished incomplete damaged missing failed fail failure error errored errors crashed crash killed kill aborted
    abort broken invalid lost unknown none
    running run scheduled queued pending waiting created submitted submit starting started initializing initialized
    initialised provisioning preparing inprogress active idle runnable notstarted notcreated suspended paused held
    resuming restarting stopping stopped finalizing closing
    pruned earlystopped stoppedearly interrupted canceled cancelled cancelrequested canceling cancelling deleted removed
    archived inactive
    preempted preempting preemptible evicted evict timeout timedout deadline deadlineexceeded expired revoked requeued
    requeuehold requeuefed resizing specialexit signaling stageout completing configuring resvdelhold nodefail bootfail
    launchfailed reconfigfail outofmemory outofme oom oomkilled
    crashloopbackoff imagepullbackoff errimagepull containercannotrun containercreating createcontainerconfigerror
    createcontainererror runcontainererror containerstatusunknown backofflimitexceeded podinitializing terminating
    nodelost shutdown nodeshutdown failuretarget metricsunavailable
    notresponding terminatedearly
    """.split()
)


@dataclass(frozen=True)
class RunState:
    """What a row says of its run; `text` is the table's own word, "" if it says nothing."""

    kind: Literal["finished", "diverged", "unfinished", "unknown"] = "finished"
    text: str = ""


def state_columns(names: Sequence[str], used: Collection[str]) -> list[str]:
    """Return the columns that state how a run ended; those `used` as arm, seed or outcome do not."""
    patterns = (STATE_COLUMN, FLAG_COLUMN, EXIT_COLUMN)
    return [
        name
        for name in names
        if name not in used
        and not name.lower().startswith(NOT_STATES)
        and any(pattern.fullmatch(name) for pattern in patterns)
    ]


def states_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[RunState]:
    """Return the state of each row, the worst of its columns.

    An empty cell says nothing, unless another row of its column is said to have finished: a run of which this is not
    said is then of unknown state.
    """
    by_column = [[_state(name, row.get(name)) for row in rows] for name in columns]
    for states in by_column:
        if any(state.kind == "finished" and state.text for state in states):
            states[:] = [state if state.text else RunState("unknown", "empty") for state in states]
    # diverged first: a tracker that calls a diverged run finished, or crashed, does not make it another run
    worst = ("finished", "unknown", "unfinished", "diverged")
    return [
        max((states[at] for states in by_column), key=lambda state: worst.index(state.kind), default=RunState())
        for at in range(len(rows))
    ]


def _state(column: str, value: Any) -> RunState:
    text = "" if value is None or value != value else str(value).strip()
    if not text:
        return RunState()
    if EXIT_COLUMN.fullmatch(column):
        # Slurm writes the code and the signal: 0:0
        passed = re.fullmatch(r"0(\.0*)?(:0)?", text)
        return RunState("finished", text) if passed else RunState("unfinished", f"{column} {text}")
    flag = FLAG_COLUMN.fullmatch(column)
    if flag is None:
        return RunState(_kind(text), text)
    if text.lower() not in ("true", "false"):
        # a time or a count of that name
        return RunState()
    kind = _kind(flag[1])
    if text.lower() == "true":
        return RunState(kind, flag[1])
    return RunState("unfinished", f"not {flag[1]}") if kind == "finished" else RunState()


def _kind(text: str) -> Literal["finished", "diverged", "unfinished", "unknown"]:
    # "TrialState.PRUNED" and "<TrialState.PRUNED: 2>" of Python, "Init:Error" of Kubernetes, "CANCELLED by 1000" and
    # "OUT_OF_ME+" of Slurm, "JOB_STATE_SUCCEEDED" of Vertex
    enum = re.fullmatch(r"<?\w+\.(\w+)(?:: .+>)?", text)
    word = re.sub(r"\s+by\s+\S+$", "", enum[1] if enum else text.rpartition(":")[2])
    letters = re.sub(r"[\s_-]", "", word.lower()).removeprefix("jobstate")
    # Ray calls a trial that ended by itself TERMINATED; elsewhere "terminated" is the end of a run that was stopped
    if letters in FINISHED or text in ("TERMINATED", "Trial.TERMINATED"):
        return "finished"
    if letters.startswith("diverged"):
        return "diverged"
    return "unfinished" if letters.rstrip("+") in UNFINISHED else "unknown"
