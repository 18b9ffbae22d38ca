"""One run as a submitit job, restarted as often as the cluster stops it, always from its last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headwise.lab.engines.local import REPLACEMENTS
from headwise.lab.engines.remote_runs import carried_out_elsewhere
from headwise.lab.training.job import Order
from headwise_verdict import StudyError

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

# seconds to wait for the lock: a cancelled job holds it until Slurm kills the job, by default after 30 s (KillWait)
LOCK_PATIENCE = 90.0


@dataclass(frozen=True)
class SlurmRun:
    """One order as a job that submitit queues again when it is preempted or out of time.

    `kept` is the number of epochs that the run had when this job started, `idle` the number of consecutive jobs that
    ended without adding one.
    """

    order: Order
    folder: str
    kept: int = 0
    idle: int = 0

    def __call__(self) -> list[dict[str, Any]]:
        """Return the run's notes, then its last event."""
        return carried_out_elsewhere(self.order, self.folder, "Slurm", self._after_previous_job())

    def checkpoint(self) -> DelayedSubmission:
        """Return what submitit queues again; submitit calls this in a job that is about to be stopped."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self.again())

    @classmethod
    def of(cls, order: Order) -> SlurmRun:
        """Return the run of an order for its first job."""
        return cls(order, os.getcwd(), order.kept())

    def again(self) -> SlurmRun:
        """Return the run for its next job.

        Raises:
            StudyError: if several consecutive jobs ended without adding an epoch.
        """
        kept = self.order.kept()
        idle = 0 if kept > self.kept else self.idle + 1
        if idle > REPLACEMENTS:
            raise StudyError(
                f"{idle} jobs in a row were stopped before one more epoch was trained. A run resumes from the end of "
                "its last epoch: "
                "give its job more time (--slurm timeout_min=...), more memory (mem_gb=...) or a shorter epoch"
            )
        return replace(self, kept=kept, idle=idle)

    @contextmanager
    def _after_previous_job(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        self.order.folder.mkdir(parents=True, exist_ok=True)
        # if it is not free then, the run itself reports who holds the lock
        with suppress(Timeout):
            FileLock(self.order.folder / ".lock", timeout=LOCK_PATIENCE).acquire().lock.release()
        yield
