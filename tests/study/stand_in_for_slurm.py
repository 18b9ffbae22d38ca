"""Stand in for Slurm's commands on one machine: sbatch with arrays and their limits, srun, sacct, scancel, scontrol
requeue.

Usage: stand_in_for_slurm.py COMMAND ARGUMENTS...; `install(folder)` makes a folder of commands for PATH. A supervisor
of each array begins its tasks, ends those that are cancelled, and begins anew those that are queued again; all is told
by files.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent.resolve()
COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder):
    """Write the commands into a folder and give the folder of their state."""
    state = folder / "state"
    state.mkdir(parents=True)
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nSTATE={state} exec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        path.chmod(0o755)
    return state


def sbatch(script):
    number = 100 + len(list(STATE.glob("*.sh")))
    text = Path(script).read_text()
    (STATE / f"{number}.sh").write_text(text)
    array = re.search(r"#SBATCH --array=0-(\d+)%(\d+)", text)
    last, limit = map(int, array.groups()) if array else (None, 1)
    names = [str(number)] if last is None else [f"{number}_{task}" for task in range(last + 1)]
    for name in names:
        tell(name, "PENDING")
    command = [sys.executable, __file__, "supervise", str(limit), *names]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(command, start_new_session=True, **quiet)
    print(f"Submitted batch job {number}")


def supervise(limit, *names):
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < int(limit):
            name = waiting.pop(0)
            running[name] = begin(name)
        for name in [*waiting, *running]:
            process = running.get(name)
            if (STATE / f"{name}.cancel").exists():
                end(process)
                tell(name, "CANCELLED by 0")
            elif (STATE / f"{name}.requeue").exists():
                end(process)
                (STATE / f"{name}.requeue").unlink()
                tell(name, "PENDING")
                waiting.append(name)
            elif process is not None and process.poll() is not None:
                tell(name, "COMPLETED" if process.returncode == 0 else "FAILED")
            else:
                continue
            running.pop(name, None)
            waiting = [other for other in waiting if not (STATE / f"{other}.cancel").exists()]
        time.sleep(0.05)


def begin(name):
    number, _, task = name.partition("_")
    own = {"SLURM_JOB_ID": number, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    own |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task} if task else {}
    tell(name, "RUNNING")
    process = subprocess.Popen(["bash", str(STATE / f"{number}.sh")], env=os.environ | own, start_new_session=True)
    (STATE / f"{name}.begun").open("a").write(f"{process.pid}\n")
    return process


def end(process):
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def srun(*arguments):
    given, known = list(arguments), {}
    while given[0].startswith("--"):
        option = given.pop(0)
        if option != "--unbuffered":
            known[option] = given.pop(0)
    env = os.environ
    places = {
        "%A": env.get("SLURM_ARRAY_JOB_ID", ""),
        "%a": env.get("SLURM_ARRAY_TASK_ID", ""),
        "%j": env["SLURM_JOB_ID"],
        "%t": "0",
    }
    for option, number in (("--output", 1), ("--error", 2)):
        path = re.sub("%[Aajt]", lambda found: places[found.group()], known[option])
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.execvp(given[0], given)


def sacct(*arguments):
    wanted = {after for before, after in itertools.pairwise(arguments) if before == "-j"}
    print("JobID|State|NodeList")
    for path in sorted(STATE.glob("*.state")):
        if path.stem.split("_")[0] in wanted:
            print(f"{path.stem}|{path.read_text()}|here")


def scancel(*names):
    for name in names:
        (STATE / f"{name}.cancel").touch()


def scontrol(requeue, name):
    assert requeue == "requeue"
    (STATE / f"{name}.requeue").touch()


def tell(name, state):
    new = STATE / f"{name}.new"
    new.write_text(state)
    os.replace(new, STATE / f"{name}.state")


if __name__ == "__main__":
    STATE = Path(os.environ["STATE"])
    globals()[sys.argv[1]](*sys.argv[2:])
