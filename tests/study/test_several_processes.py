"""A run that spans several processes gives the numbers of one process on the whole batches."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from small_studies import PLACE, all_numbers, carry, study_of, tiny_study
from test_engines import lines, wait_for

ARM = "NeuTRENO(strength=0.5) + AttentionNormPenalty(strength=1.0, per_map=True)"
ARM_OF_ONE = "RelaxedAttention(gamma=0.2)"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "headwise.cli")
# how many launches in a row must end with 0
LAUNCHES = int(os.environ.get("HEADWISE_LAUNCHES", "2"))


def launched(form, task, out, *arguments):
    """Return the command that carries out a study of a tiny task in two processes."""
    command = [sys.executable, "-m", *(TORCHRUN if form == "torchrun" else ("headwise.cli",)), "compare"]
    command += ["--task", f"{PLACE}:{task}", "--device", "cpu", "--out", str(out), *arguments]
    return command if form == "torchrun" else [*command, "--processes", "2"]


def started(form, out):
    """Start a study with pauses in two processes that hear Ctrl-C; give the process, and all of them when it trains."""
    hear = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    command = launched(form, "Slow", out, "--seeds", "1", "--method", "DropHead(p=0.3)")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **hear)
    wait_for(lambda: lines(out) >= 2)
    return process, psutil.Process(process.pid).children(recursive=True)


def gone(family):
    return wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1] or None)


def test_two_processes_train_to_the_numbers_of_one(tmp_path):
    # a task of the same numbers, whose libraries abort as a process ends: a launch must not end with that
    command = launched("torchrun", "Aborting", tmp_path / "two", "--seeds", "1", "--method", ARM)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "report: " in done.stdout and "Abort" not in done.stderr
    carry(tiny_study("Still", methods=(ARM,)), tmp_path / "one")
    two, one = (
        {result["arm"]: (lines, result["metrics"]) for lines, result in all_numbers(tmp_path / name).values()}
        for name in ("two", "one")
    )
    # left out of what is compared between runs of several processes
    peaks = {
        result["arm"]: result["metrics"]["cost/peak_memory_bytes"]
        for result in (json.loads(path.read_text()) for path in (tmp_path / "two").glob("runs/*/result.json"))
    }
    assert two.keys() == one.keys()
    for method, (whole, metrics) in one.items():
        for ours, theirs in zip(two[method][0], whole, strict=True):
            assert ours.pop("metrics") == pytest.approx(theirs.pop("metrics"), abs=2e-5), method
            assert ours == theirs
        # each process holds half of a batch
        assert peaks[method] < metrics.pop("cost/peak_memory_bytes")
        assert two[method][1] == pytest.approx(metrics, abs=2e-5), method


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("form", ["torchrun", "--processes"])
def test_launches_in_a_row_end_with_0_whatever_the_libraries_leave_behind(tmp_path, form):
    for number in range(LAUNCHES):
        command = launched(form, "Aborting", tmp_path / str(number), "--seeds", "1", "--method", "DropHead()")
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (number, done.stderr)
        assert "report: " in done.stdout and "Abort" not in done.stderr


@pytest.mark.grid
def test_ctrl_c_ends_all_processes_with_one_line_and_130(tmp_path):
    out = tmp_path / "out"
    process, family = started("--processes", out)
    assert len(family) >= 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said and said.count("stopped") == 1, said
    assert said.strip().splitlines()[-1] == f"stopped; nothing is lost. The same command resumes from {out}"
    gone(family)


@pytest.mark.grid
def test_ctrl_c_under_torchrun_ends_the_ranks_without_a_traceback_of_theirs(tmp_path):
    out = tmp_path / "out"
    process, family = started("torchrun", out)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    ours, _, torchruns = said.partition("Traceback")
    # torchrun itself prints one traceback, of its own files, and gives 1: no process below it can change that
    assert process.returncode == 1 and "Traceback" not in torchruns and "headwise" not in torchruns, said
    assert ours.count(f"stopped; nothing is lost. The same command resumes from {out}") == 1, said
    gone(family)


@pytest.mark.grid
@pytest.mark.parametrize("form", ["torchrun", "--processes"])
def test_the_processes_end_with_the_one_that_launched_them(tmp_path, form):
    process, family = started(form, tmp_path)
    process.kill()
    process.communicate()
    gone(family)


# seconds that C code holds the interpreter, so that no thread of Python can look for the launcher
HELD = 600
HOLDING = (
    "from headwise.lab.engines import rank; import ctypes; rank.hear_stops(); print(1, flush=True); "
    f"ctypes.PyDLL(None).sleep({HELD})"
)
LAUNCH = (
    "import os, subprocess, sys; print(subprocess.Popen([sys.executable, *sys.argv[1:]]).pid, flush=True); "
    "sys.stdin.read()"
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no signal for the end of a parent")
def test_a_process_that_is_held_in_c_ends_with_its_launcher():
    command = [sys.executable, "-c", LAUNCH, "-c", HOLDING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        rank = psutil.Process(int(launcher.stdout.readline()))
        assert launcher.stdout.readline() == "1\n"
        launcher.kill()
    try:
        gone([rank])
    finally:
        rank.kill() if rank.is_running() else None


def test_a_rank_whose_torchrun_was_killed_while_it_started_ends_by_itself(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environment = os.environ | environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = ["-m", "headwise", "compare", "--task", f"{PLACE}:Slow", "--device", "cpu", "--out", str(tmp_path)]
    # its parent is gone before it can see it: who looks for the parent sees the one that took its place
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=-3, stderr=-3).pid)"
    told = subprocess.run(
        [sys.executable, "-c", code, *command], env=environment, capture_output=True, text=True, check=True
    )
    rank = psutil.Process(int(told.stdout))
    try:
        gone([rank])
    finally:
        rank.kill() if rank.is_running() else None


@pytest.mark.parametrize(
    ("options", "launched", "message"),
    [
        (
            {"processes": 2, "engine": "ray"},
            1,
            "--engine ray gives each run one process. Leave --processes or --engine",
        ),
        ({"processes": 2, "jobs": 2}, 1, "--jobs 2: runs of several processes run one after the other"),
        ({"processes": 2, "trials": 3}, 1, "--tune works with one process a run. Tune with one"),
        ({"processes": 3}, 2, "--processes 3, but 2 processes were launched. Leave --processes out, or launch 3"),
    ],
)
def test_processes_that_cannot_be_are_refused_before_anything_starts(monkeypatch, options, launched, message):
    from headwise.lab.comparing.command import Request, check
    from headwise_verdict.files.errors import StudyError

    monkeypatch.setenv("WORLD_SIZE", str(launched))
    with pytest.raises(StudyError, match=message):
        check(Request(**options))


@pytest.mark.grid
def test_an_error_in_several_processes_is_told_and_gives_1(tmp_path):
    command = launched("--processes", "Still", tmp_path, "--method", "DropHed()")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: --method 'DropHed()': There is no method 'DropHed'" in done.stderr


def test_tuning_over_several_processes_is_refused(tmp_path):
    from headwise_verdict.files.errors import StudyError

    with pytest.raises(StudyError, match="--tune works with one process a run"):
        carry(tiny_study().model_copy(update={"processes": 2}), tmp_path, trials=1)


@pytest.mark.grid
def test_sums_rows_and_unequal_batches_are_the_same_over_processes_with_readings(tmp_path):
    place = PLACE.replace("tiny_task.py", "core_tasks.py") + ":Shared"
    launch = [sys.executable, "-m", "headwise.cli", "compare", "--task", place, "--seeds", "1", "--processes", "2"]
    command = [*launch, "--method", ARM_OF_ONE, "--watch", "--device", "cpu", "--out", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    carry(study_of(place, (ARM_OF_ONE,)), tmp_path / "one")
    two, one = (
        {result["arm"]: (lines, result["metrics"]) for lines, result in all_numbers(tmp_path / name).values()}
        for name in ("two", "one")
    )
    assert two.keys() == one.keys() == {"baseline", ARM_OF_ONE}, done.stderr
    assert done.returncode == 0, done.stderr
    readings = [(folder / "health.jsonl").read_text() for folder in (tmp_path / "two" / "runs").iterdir()]
    assert len(readings) == 2 and all('"statistic"' in text for text in readings)
    for arm, (stream, metrics) in one.items():
        found = two[arm][1]
        assert {"test/perplexity", "test/spearman", "test/letters", "train/loss"} <= found.keys()
        for name, value in metrics.items():
            if not name.startswith("cost/"):
                assert found[name] == pytest.approx(value, rel=1e-4), (arm, name)
        assert [line["metrics"] for line in two[arm][0]] == [
            pytest.approx(line["metrics"], rel=1e-4) for line in stream
        ]
