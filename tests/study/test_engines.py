"""Engines: worker processes and how many of them change no number; deaths, failures and stops are survived."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from small_studies import PLACE, Silent, all_numbers, carry, tiny_study

from headwise.lab.engines.local import LocalEngine
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.ownership import MARKER

ARMS = ("DropHead(p=0.3)", "RelaxedAttention(gamma=0.2)")


def headwise(*arguments, **options):
    command = [sys.executable, "-m", "headwise.cli", *arguments]
    # A shell that runs the tests in the background makes its children ignore Ctrl-C: the command must hear it.
    hear = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **hear, **options)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.02)
    return found


def lines(out):
    return sum(path.read_text().count("\n") for path in Path(out).glob("runs/*/metrics.jsonl"))


class Engine:
    """Close a local engine at the end of a with block."""

    def __init__(self, jobs):
        self.engine = LocalEngine(jobs)

    def __enter__(self):
        return self.engine

    def __exit__(self, *_):
        self.engine.close()


@pytest.mark.grid
def test_the_number_of_jobs_changes_no_number(tmp_path):
    study = tiny_study(methods=ARMS, seeds=2)
    with Engine(2) as engine:
        carry(study, tmp_path / "two", engine)
    # one after the other, in one process
    carry(study, tmp_path / "one")
    found = [all_numbers(tmp_path / name) for name in ("one", "two")]
    assert len(found[0]) == 6 and found[0] == found[1]


def test_a_killed_worker_is_replaced_and_its_run_goes_on_to_the_same_numbers(tmp_path):
    study, listener = tiny_study("Slow", seeds=1), Silent()
    victims = []

    class KillOnce(Silent):
        def hear(self, order, event):
            super().hear(order, event)
            listener.said += self.said
            if not victims and event["event"] == "progress" and lines(tmp_path / "killed") >= 3:
                victims.append(engine._workers[0].process.pid)
                os.kill(victims[0], signal.SIGKILL)

    with Engine(1) as engine:
        carry(study, tmp_path / "killed", engine, KillOnce())
    carry(study, tmp_path / "whole")
    assert victims and any("exit code -9; its run resumes from its last checkpoint" in text for text in listener.said)
    assert all_numbers(tmp_path / "killed") == all_numbers(tmp_path / "whole")


@pytest.mark.grid
def test_a_run_whose_workers_keep_dying_is_given_up_with_a_remedy(tmp_path, monkeypatch):
    import headwise.lab.engines.local as local

    monkeypatch.setattr(local, "REPLACEMENTS", 0)

    class KillAlways(Silent):
        def hear(self, order, event):
            if event["event"] == "progress":
                os.kill(engine._workers[0].process.pid, signal.SIGKILL)

    with (
        Engine(1) as engine,
        pytest.raises(StudyError, match=r"baseline, seed 0, ended with exit code -9 .*fewer --jobs"),
    ):
        carry(tiny_study("Slow", pause=0.6), tmp_path, engine, KillAlways())


def test_a_failing_task_names_the_run_and_what_it_was_given(tmp_path):
    message = (
        r"(?s)baseline, seed 0, could not continue: Faulty fails on its first 3 training examples, "
        r"\(float32 \(3, 1, 4, 4\), float32 \(3,\)\).*RuntimeError: .*Long.*same command again"
    )
    with pytest.raises(StudyError, match=message):
        carry(tiny_study("Faulty"), tmp_path)


def test_a_run_that_fails_while_training_shows_where(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such weather")

    monkeypatch.setattr("headwise.lab.training.train._step", fail)
    message = r"(?s)baseline, seed 0, could not continue: RuntimeError: no such weather.*Details: .*same command again"
    with pytest.raises(StudyError, match=message):
        carry(tiny_study(), tmp_path)
    log = (tmp_path / "failures.log").read_text(encoding="utf-8")
    assert "Traceback" in log and "train.py" in log and "no such weather" in log


def test_splits_of_unequal_length_are_refused(tmp_path):
    with pytest.raises(StudyError, match=r"Broken.data\('train'\) returned .*: its parts hold 3, 2 examples"):
        carry(tiny_study("Broken"), tmp_path)


def test_two_processes_on_one_folder_are_refused(tmp_path):
    (tmp_path / MARKER).write_text("*\n")
    (tmp_path / ".lock.json").write_text('{"process": 4711, "host": "here", "since": "12:00:00"}')
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(StudyError, match=r"another headwise is working in .*process 4711 on here.*choose another --out"),
    ):
        carry(tiny_study(), tmp_path)
    carry(tiny_study(), tmp_path)


@pytest.mark.grid
def test_ctrl_c_says_how_to_go_on_and_leaves_no_process_behind(tmp_path):
    out = tmp_path / "out"
    command = (
        "compare",
        "--task",
        f"{PLACE}:Slow",
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--method",
        ARMS[0],
        "--out",
        str(out),
    )
    stopped = headwise(*command)
    wait_for(lambda: lines(out) >= 3)
    family = psutil.Process(stopped.pid).children(recursive=True)
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=300)
    assert stopped.returncode == 130, said
    assert f"The same command resumes from {out}" in said and "Traceback" not in said
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1])
    before = lines(out)
    # a parent that is killed outright takes its workers with it
    killed = headwise(*command)
    wait_for(lambda: lines(out) > before)
    family = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1])
    again = headwise(*command)
    printed, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert "DropHead(p=0.3), seed 1" in printed or "finished already" in printed
    carry(tiny_study("Slow", methods=ARMS[:1], seeds=2).model_copy(update={"name": "Slow"}), tmp_path / "whole")
    assert all_numbers(out) == all_numbers(tmp_path / "whole")
