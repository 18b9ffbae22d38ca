"""Processes of a group for tests: forks of this one, which has imported torch already."""

import socket
import warnings

import torch
import torch.multiprocessing as mp


def in_two_processes(worker, *arguments):
    """Call `worker(rank, port, *arguments)` in two processes, and raise what either raises."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with warnings.catch_warnings():
        # from Python 3.12 on a fork of a process with threads warns; torch's threads are idle here
        warnings.simplefilter("ignore", DeprecationWarning)
        # a fork cannot use a GPU that this process has begun to use
        start = "spawn" if torch.cuda.is_initialized() else "fork"
        mp.start_processes(_called, (worker, port, *arguments), nprocs=2, daemon=True, start_method=start)


def _called(rank, worker, *arguments):
    # not as errors, as pytest has them here: as in a process that was started
    warnings.simplefilter("default")
    torch.set_num_threads(1)
    worker(rank, *arguments)
