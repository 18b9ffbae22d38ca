"""How the storm starts its studies: forks of a process that has torch imported, the real command, a Ray cluster."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from small_studies import PLACE

ARM = "DropHead(p=0.3) + NeuTRENO(strength=0.4)"
EPOCHS = 6
# so high that figures of the heads pass their limits: alerts are compared too
RATE = 0.3
# seconds for a Ray cluster to end
ENDING = 15.0


@dataclass(frozen=True)
class Kind:
    """Say how a study is carried out, and the part of all kills that strike this kind."""

    share: float
    options: dict = field(default_factory=dict)
    # the kind whose numbers it must give
    like: str | None = None
    # whether a worker that dies is replaced
    replaces: bool = False
    # what it needs that may be absent
    needs: str | None = None


KINDS = {
    "tuned": Kind(0.42, {"trials": 2, "watch": True, "jobs": 2}, replaces=True),
    "plain": Kind(0.26, {"watch": True, "jobs": 2}, replaces=True),
    "together": Kind(0.25, {"watch": True, "processes": 2}),
    "ray": Kind(0.03, {"watch": True, "engine": "ray"}, like="plain", replaces=True, needs="ray"),
    "slurm": Kind(
        0.02,
        {"watch": True, "engine": "slurm", "slurm": ("executor=local",), "jobs": 2},
        like="plain",
        replaces=True,
        needs="submitit",
    ),
    "command": Kind(0.02, {"watch": True, "processes": 2}, like="together"),
}


def missing(name):
    """Name the library that a kind needs and that is not here."""
    import importlib.util

    needed = KINDS[name].needs
    return needed if needed and importlib.util.find_spec(needed) is None else None


class Fork:
    """Run a function in a fork that leads a session of its own; looks like a Popen."""

    def __init__(self, work, log):
        sys.stdout.flush()
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                # worker processes are forks too: a new interpreter would spend its life importing
                fork = multiprocessing.get_context("fork")
                multiprocessing.get_context = lambda method=None: fork
                with open(log, "a") as stream:
                    os.dup2(stream.fileno(), 1)
                    os.dup2(stream.fileno(), 2)
                code = exit_code(work)
            finally:
                os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.005)
        return self.returncode


def exit_code(work):
    """Carry out the work and give the exit code that the command line would give."""
    import traceback

    try:
        work()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def begin(name, out, ray):
    """Start a study of a kind in a session of its own."""
    from headwise.lab.comparing.command import run
    from headwise.lab.comparing.request import Request

    options, task = KINDS[name].options, f"{PLACE}:Tiny"
    if name == "command":
        command = [sys.executable, "-m", "headwise.cli", "compare", "--task", task, "--epochs", str(EPOCHS), "--watch"]
        command += [
            "--set",
            f"learning_rate={RATE}",
            "--seeds",
            "1",
            "--method",
            ARM,
            "--device",
            "cpu",
            "--processes",
            "2",
            "--out",
            str(out),
        ]
        with open(f"{out}.log", "a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    more = {"ray_address": ray} if options.get("engine") == "ray" else {}
    more |= {"settings": (f"learning_rate={RATE}",), "epochs": EPOCHS}
    request = Request(task=task, methods=(ARM,), seeds=1, device="cpu", out=out, **options, **more)
    return Fork(lambda: run(request), f"{out}.log")


def ended(launcher, seconds):
    until = time.monotonic() + seconds
    while launcher.poll() is None:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def ray_cluster():
    """Start a Ray cluster of this machine in a process of its own; give its address."""
    script = Path(__file__).with_name("ray_for_the_storm.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    holder = subprocess.Popen([sys.executable, str(script)], text=True, **pipes)
    address = holder.stdout.readline().strip()
    family = psutil.Process(holder.pid).children(recursive=True)
    try:
        yield address, family
    finally:
        holder.communicate()
        psutil.wait_procs(family, timeout=ENDING)


def warm():
    """Import what a study imports, once for all forks; nothing here may start a thread that a fork would lack."""
    import importlib

    verdict = ("headwise_verdict.reporting.rebuild", "headwise_verdict.results.table")
    for name in ("headwise.lab.training.execution", "headwise.lab.comparing.tune", *verdict):
        importlib.import_module(name)
    for name in ("optuna.storages.journal", "altair", "vl_convert", "scipy.stats", "torch.profiler", "torch._dynamo"):
        importlib.import_module(name)
