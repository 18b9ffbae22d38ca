"""Kill studies with SIGKILL at random moments and hold every number against a study that was never stopped.

Usage: python storm.py [--kills 1000] [--seed 0] [--kinds tuned,plain,together,ray,slurm,command] [--victim worker]
[--folder FOLDER]

The last line is a JSON summary; the exit code is 1 when a number or a line of the readings differs, a study hangs, a
process or a held lock stays behind, or a file that an undisturbed study does not leave. Studies start as forks of this
process, which has torch imported: most of their time is theirs, not Python's. The kind `command` starts the real
command instead.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from filelock import FileLock, Timeout
from small_studies import all_numbers, numbers
from storm_studies import KINDS, begin, ended, missing, ray_cluster, warm

# seconds for what is left of a study whose launcher alone was killed
PATIENCE = 60.0
# seconds; a study that takes longer has hung. Ray's engine takes a silent run for lost after two minutes
LONGEST = 300.0


class Storm:
    """Hold one storm: its chance, its folder, what was killed and what was found."""

    def __init__(self, seed, folder, only=None):
        self.chance, self.folder, self.only = random.Random(seed), folder, only
        self.kills, self.victims, self.studies, self.compared = Counter(), Counter(), Counter(), 0
        # the texts of what was found, by what it is
        self.faults = {"differences": [], "processes_left": [], "hangs": [], "others": []}
        self.whole, self.ray, self.family = {}, None, []

    def strike(self, name, kills):
        """Kill studies of one kind until `kills` are reached; each study is ended and compared before the next."""
        # its own time: interpreters that begin anew import for seconds
        (whole, _), (_, seconds) = self.reference(KINDS[name].like or name), self.reference(name)
        left = kills
        while left > 0:
            out = self.folder / f"{name} {self.studies[name]}"
            before, rest = self.kills[name], seconds
            while self.kills[name] < before + left:
                delay = self.chance.uniform(0.02, 0.8) * rest
                if not self.killed(name, out, delay):
                    break
                # A study that goes on needs less time than a whole one; much of what a start costs comes again.
                rest = max(rest - delay / 2, seconds / 4)
            left -= self.kills[name] - before
            self.finish(name, out, whole)
            if not any(self.faults.values()):
                shutil.rmtree(out)

    def reference(self, name):
        """Carry out a study that is never stopped; give its folder and how many seconds it took."""
        if name not in self.whole:
            out, begun = self.folder / f"{name} whole", time.monotonic()
            self.end(name, begin(name, out, self.ray), out)
            self.whole[name] = out, time.monotonic() - begun
        return self.whole[name]

    def killed(self, name, out, seconds):
        """Start a study and kill it, or a process of it, after some seconds; tell whether it must be started again."""
        launcher = begin(name, out, self.ray)
        if ended(launcher, seconds):
            self.judge_end(name, out, launcher)
            return False
        victim = self.victim(name)
        if victim == "worker":
            # the study itself goes on
            self.count(name, victim, self.kill_a_worker(name, launcher, out))
            self.end(name, launcher, out)
            return False
        self.count(name, victim)
        with contextlib.suppress(ProcessLookupError):
            (os.kill if victim == "launcher" else os.killpg)(launcher.pid, signal.SIGKILL)
        launcher.wait()
        if victim == "all":
            for job in jobs_of(out):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(job.pid), signal.SIGKILL)
        # of the launcher alone: what it started must end by itself
        self.expect_nobody(name, launcher.pid, out)
        return True

    def count(self, name, victim, times=1):
        self.kills[name] += times
        self.victims[victim] += times

    def victim(self, name):
        """Choose what is killed: mostly all, now and then the launcher alone or, where it is replaced, one worker."""
        if self.only:
            return self.only
        chance = self.chance.random()
        if KINDS[name].replaces and chance < 0.15:
            return "worker"
        return "launcher" if chance < 0.4 else "all"

    def kill_a_worker(self, name, launcher, out):
        """Kill a worker, waiting for one; give how many were killed: none where the study ends before."""
        while launcher.poll() is None:
            found = workers(name, launcher, out, self.family)
            with contextlib.suppress(psutil.Error, IndexError):
                self.chance.choice(sorted(found, key=lambda process: process.pid)).kill()
                return 1
            time.sleep(0.05)
        return 0

    def end(self, name, launcher, out):
        if not ended(launcher, LONGEST):
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            self.fault("hangs", f"{out} hung for {LONGEST} s")
        else:
            self.judge_end(name, out, launcher)

    def judge_end(self, name, out, launcher):
        if launcher.wait() != 0:
            said = Path(f"{out}.log").read_text(errors="replace")[-2000:]
            self.fault("others", f"{out} ended with {launcher.wait()}: {said}")
        self.expect_nobody(name, launcher.pid, out)

    def finish(self, name, out, whole):
        """Start a study once more, which ends it, and compare all that it left with the one never stopped."""
        self.end(name, begin(name, out, self.ray), out)
        self.studies[name] += 1
        for part in ("runs", "trials"):
            found, expected = (read(folder, part) for folder in (out, whole))
            self.compared += len(expected)
            if found != expected:
                runs = differing(found, expected)
                self.fault("differences", f"{out}: {part} {runs} differ from those of a study never stopped")
        if left := names(out) ^ names(whole):
            self.fault("differences", f"{out} and a study never stopped differ in the files {sorted(left)}")
        for lock in out.rglob("*.lock"):
            try:
                FileLock(lock, timeout=0).acquire().lock.release()
            except Timeout:
                self.fault("others", f"{lock} is still held")

    def expect_nobody(self, name, session, out):
        """Wait until no process of a study is left; Ray's workers belong to the cluster, which is looked at in the
        end."""
        until = time.monotonic() + PATIENCE
        while found := [*members(session), *jobs_of(out)]:
            if time.monotonic() > until:
                self.fault("processes_left", f"{name}: {[p.pid for p in found]} stayed behind")
                for process in found:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                return
            time.sleep(0.05)

    def fault(self, kind, text):
        self.faults[kind].append(text)
        print(f"FAULT {text}", flush=True)

    def summary(self):
        """Return the one line of JSON: kills by kind and by victim, and how much of each fault was found."""
        counts = {kind: len(texts) for kind, texts in self.faults.items()}
        told = {"kills": sum(self.kills.values()), "by_kind": dict(self.kills), "by_victim": dict(self.victims)}
        return told | {"studies": dict(self.studies), "compared": self.compared, **counts, "faults": self.faults}


def workers(name, launcher, out, family):
    """Return the processes of a study that carry out runs and are replaced when they die."""
    if name == "ray":
        return [p for one in family if one.is_running() for p in descendants(one) if "carry_out_remotely" in title(p)]
    if name == "slurm":
        return [child for job in jobs_of(out) for child in descendants(job)]
    return descendants(psutil.Process(launcher.pid))


def descendants(process):
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def title(process):
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def jobs_of(out):
    """Return the processes of submitit, which belong to no session of a study and name its folder."""
    return [process for process in psutil.process_iter() if f"{out}/slurm" in title(process) and alive(process)]


def alive(process):
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def members(session):
    """Return the living processes of a session."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def read(out, part):
    """Return by run all that it computed: its stream, its result and the readings of its heads."""
    if not (out / part).is_dir():
        return {}
    found = all_numbers(out) if part == "runs" else {f.name: numbers(f) for f in sorted((out / part).iterdir())}
    return {name: (*found[name], readings(out / part / name / "health.jsonl")) for name in found}


def readings(path):
    """Return the lines of a health file as they stand: readings and alerts, in their order."""
    return path.read_text().splitlines() if path.exists() else None


def differing(found, expected):
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def names(out):
    # scripts and logs of jobs are named by the jobs' numbers
    found = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    return {str(path) for path in found if path.parts[0] != "slurm"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--victim", choices=["all", "launcher", "worker"], help="kill nothing else")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    chosen = asked.kinds.split(",")
    for name in [name for name in chosen if missing(name)]:
        print(f"{name}: left out, {missing(name)} is not installed", flush=True)
        chosen.remove(name)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    warm()
    storm, begun = Storm(asked.seed, folder, asked.victim), time.monotonic()
    total = sum(KINDS[name].share for name in chosen)
    wanted = {name: max(1, round(asked.kills * KINDS[name].share / total)) for name in chosen}
    wanted[chosen[0]] += asked.kills - sum(wanted.values())
    with contextlib.suppress(KeyboardInterrupt):
        strike_all(storm, chosen, wanted)
    print(json.dumps(storm.summary() | {"seconds": round(time.monotonic() - begun)}))
    sys.exit(1 if any(storm.faults.values()) else 0)


def strike_all(storm, chosen, wanted):
    """Strike every kind; Ctrl-C ends the storm early, and what was found until then is told."""
    for name in chosen:
        with ray_cluster() if name == "ray" else contextlib.nullcontext((None, [])) as (storm.ray, storm.family):
            storm.strike(name, wanted[name])
        if left := [process for process in storm.family if process.is_running()]:
            storm.fault("processes_left", f"ray: {left} stayed behind")
        print(f"{name}: {storm.kills[name]} kills, {storm.studies[name]} studies", flush=True)


if __name__ == "__main__":
    main()
