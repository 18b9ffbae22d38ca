"""The Slurm engine: one job a run, in arrays; a job that is preempted, out of time or lost is queued again.

A run continues from its last checkpoint. The folder of the study must be on a file system that all nodes share. Jobs
outlive the command that queued them unless it is stopped by Ctrl-C; a restarted command finds them in
`slurm/jobs.json`.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.files.durable import write_json
from headwise.files.provenance import usable_cores
from headwise.lab.engines.remote_runs import MetricStreams
from headwise.lab.engines.slurm_job import SlurmRun
from headwise.lab.engines.slurm_options import SlurmOptions
from headwise.lab.files.stops import STOPS, Stopped
from headwise.lab.training.job import Order
from headwise_verdict import StudyError
from headwise_verdict.files import read_json

# seconds between two checks of the jobs
GLANCE = 1.0
# seconds for cancelled jobs on this machine to end
PATIENCE = 10.0
# Slurm refuses larger arrays unless its administrator allows them
LARGEST_ARRAY = 1000
# submitit never refuses to requeue a job: the run decides, because it knows its progress
ALWAYS = 1_000_000


class SlurmEngine:
    """An engine with Slurm jobs, at most `jobs` at a time; its results equal those of the local engine."""

    parallel = True
    # the first jobs of all arms start together; a rehearsal job before them would wait in the queue as long again
    rehearses = False

    def __init__(self, options: SlurmOptions, jobs: int | None = None) -> None:
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise StudyError(
                "--engine slurm needs submitit, which is not installed: pip install 'headwise[slurm]'."
            ) from error
        on_cluster = options.executor == "slurm"
        missing = [name for name in ("sbatch", "srun", "sacct", "scancel") if on_cluster and not shutil.which(name)]
        if missing:
            raise StudyError(
                f"--engine slurm: there is no {missing[0]} here. Start the command on a machine that submits to Slurm, "
                "or try it out with --slurm executor=local."
            )
        self._submitit, self._options = submitit, options
        self._limit = jobs if on_cluster else jobs or usable_cores()
        self._waiting: deque[SlurmRun] = deque()
        self._running: dict[str, tuple[Any, SlurmRun]] = {}
        self._streams = MetricStreams()
        self._earlier: dict[str, Any] | None = None

    def submit(self, order: Order) -> None:
        """Add one run; `events` queues it in one array with the others."""
        run = SlurmRun.of(order)
        if self._earlier is None:
            self._earlier = self._find_earlier(order)
        job = self._earlier.pop(order.identity, None)
        if job is None:
            self._waiting.append(run)
        else:
            self._running[order.identity] = job, run

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until no run is waiting or queued; progress is read from the metric streams."""
        self._queue_runs()
        while self._running:
            for identity, (job, run) in list(self._running.items()):
                if job.done():
                    del self._running[identity]
                    yield from ({**event, "run": identity} for event in self._collect(job, run))
                else:
                    yield from self._streams.progress(run.order)
            self._queue_runs()
            if self._running:
                time.sleep(GLANCE)

    def close(self) -> None:
        """Cancel every unfinished job; its run continues from its last checkpoint."""
        jobs = [job for job, _ in self._running.values()]
        if not jobs:
            return
        if self._options.executor == "slurm":
            subprocess.call(["scancel", *(job.job_id for job in jobs)])
        else:
            for job in jobs:
                job.cancel(check=False)
            if self._options.executor == "local":
                _wait_for_end(jobs)
        _, (_, run) = self._running.popitem()
        self._running.clear()
        self._remember(run.order)

    def _queue_runs(self) -> None:
        room = self._room()
        if not self._waiting or room <= 0:
            return
        runs = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        executor = self._executor(runs[0].order)
        with _delayed_stops():
            for run, job in zip(runs, executor.submit_array(runs)):
                self._running[run.order.identity] = job, run
            self._remember(runs[0].order)

    def _room(self) -> int:
        """Return how many runs may be queued now; all of them on Slurm, which enforces the limit of an array itself."""
        if self._limit is None or (self._options.executor == "slurm" and not self._running):
            return LARGEST_ARRAY
        return self._limit - len(self._running)

    def _executor(self, order: Order) -> Any:
        kind = self._options.executor
        more = {} if kind == "debug" else {f"{kind}_max_num_timeout": ALWAYS}
        executor = self._submitit.AutoExecutor(_folder(order), cluster=kind, **more)
        parallelism = {} if self._limit is None else {"slurm_array_parallelism": self._limit}
        executor.update_parameters(**self._options.parameters(order.device, order.configuration.threads), **parallelism)
        return executor

    def _collect(self, job: Any, run: SlurmRun) -> list[dict[str, Any]]:
        """Return the events of a job that ended; a run without a result continues in another job."""
        events: list[dict[str, Any]]
        try:
            events = job.result()
            # keep the logs, which show where a run was executed
            for pickle in (job.paths.submitted_pickle, job.paths.result_pickle):
                pickle.unlink(missing_ok=True)
        except self._submitit.core.utils.FailedJobError as error:
            events = [{"event": "failed", "reason": f"job {job.job_id}: {error}", "trace": ""}]
        except self._submitit.core.utils.UncompletedJobError:
            events = self._requeue(job, run)
        self._remember(run.order)
        return events

    def _requeue(self, job: Any, run: SlurmRun) -> list[dict[str, Any]]:
        ending = f"job {job.job_id} ended without a result ({job.state}); its log is {job.paths.stderr}"
        if job.state.startswith("CANCELLED"):
            return [{"event": "failed", "reason": f"job {job.job_id} was cancelled by hand", "trace": ""}]
        try:
            self._waiting.appendleft(run.again())
        except StudyError as error:
            return [{"event": "failed", "reason": f"{ending}. {error}", "trace": ""}]
        return [{"event": "note", "text": f"{ending}. Its run resumes from its last checkpoint in another job"}]

    def _remember(self, order: Order) -> None:
        """Store which job carries out which run, for a command that is restarted while they are queued."""
        if self._options.executor != "slurm":
            return
        path = _folder(order) / "jobs.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {identity: job.job_id for identity, (job, _) in self._running.items()})

    def _find_earlier(self, order: Order) -> dict[str, Any]:
        """Return the jobs of an earlier command that are still queued or running, by run."""
        known = read_json(_folder(order) / "jobs.json") if self._options.executor == "slurm" else None
        if not isinstance(known, dict) or not known:
            return {}
        kind = self._submitit.SlurmJob
        jobs: dict[str, Any] = {
            identity: kind(folder=_folder(order), job_id=number) for identity, number in known.items()
        }
        # a single query for all jobs
        kind.watcher.update()
        states = {identity: kind.watcher.get_state(job.job_id, mode="cache") for identity, job in jobs.items()}
        gone = {name for name, state in states.items() if state == "UNKNOWN"}
        return {
            identity: job
            for identity, job in jobs.items()
            if identity not in gone and not kind.watcher.is_done(job.job_id, mode="cache")
        }


def _folder(order: Order) -> Path:
    """Return the folder of scripts and logs: next to the runs, where all nodes see it."""
    return order.folder.parent.parent / "slurm"


def _wait_for_end(jobs: list[Any]) -> None:
    end = time.monotonic() + PATIENCE
    while any(not job.done() for job in jobs) and time.monotonic() < end:
        time.sleep(0.05)


@contextmanager
def _delayed_stops() -> Iterator[None]:
    """Delay stop signals to the end of the block: jobs that were queued but not recorded could not be cancelled."""
    received: list[int] = []
    with contextlib.ExitStack() as stack:
        for number in STOPS:
            before = signal.getsignal(number)
            ignored = before is signal.SIG_IGN
            if ignored and number != signal.SIGINT:
                continue
            # a local job is cancelled by SIGINT; a shell's `&` ignores SIGINT, and a job would inherit that
            handler = _ignore if ignored else (lambda number, frame: received.append(number))
            with contextlib.suppress(ValueError):
                # only the main thread can receive signals
                signal.signal(number, handler)
                stack.callback(signal.signal, number, before)
        yield
    if received:
        raise Stopped(received[0])


def _ignore(number: int, frame: object) -> None:
    """Do nothing; unlike an ignored signal, a handler is not inherited by child processes."""
