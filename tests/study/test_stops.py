"""Ctrl-C and SIGTERM: one line and the shell's exit code at whatever moment, and nothing lost."""

import signal
import subprocess
import sys

import psutil
import pytest
from grids import part_of_grid
from small_studies import PLACE, all_numbers, carry, tiny_study
from test_engines import lines, wait_for

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
ARM = "DropHead(p=0.3)"
LINE = "stopped; nothing is lost. The same command resumes"


def started(*arguments, python=(), ignoring=()):
    """Start the command with signals as a terminal leaves them, or some of them ignored, as a script's `&` does."""
    left = {number: signal.SIG_IGN if number in ignoring else signal.SIG_DFL for number in CODES}
    hear = {"preexec_fn": lambda: [signal.signal(number, state) for number, state in left.items()]}
    command = [sys.executable, *python, "-m", "headwise", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **hear)


# a library of the command line, one of the study, and one that workers import too
MOMENTS = [(library, number) for library in ("typer", "pydantic", "torch._C") for number in CODES]


@pytest.mark.parametrize(
    ("library", "number"), part_of_grid(MOMENTS, [("pydantic", signal.SIGINT), ("torch._C", signal.SIGTERM)])
)
def test_a_stop_while_libraries_are_imported_prints_one_line(tmp_path, number, library):
    command = ("compare", "--task", f"{PLACE}:Slow", "--jobs", "1", "--out", str(tmp_path / "out"))
    process = started(*command, python=("-X", "importtime"))
    said = []
    for line in process.stderr:
        if line.startswith("import time"):
            if line.split("|")[-1].strip().startswith(library):
                break
        else:
            said.append(line)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, rest = process.communicate(timeout=300)
    said += [line for line in rest.splitlines(keepends=True) if not line.startswith("import time")]
    told = "".join(said).strip()
    assert process.returncode == CODES[number], told
    assert told.startswith(LINE) and "\n" not in told
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1])


@pytest.mark.grid
# a tuned study goes on in tests/study/test_storm.py, and Ctrl-C in several processes in test_several_processes.py
@pytest.mark.parametrize(
    "extra",
    [
        ("--jobs", "1"),
        *(pytest.param(one, marks=pytest.mark.grid) for one in (("--jobs", "2", "--tune", "2"), ("--processes", "2"))),
    ],
)
def test_sigterm_to_a_whole_job_prints_one_line_and_loses_nothing(tmp_path, extra):
    out = tmp_path / "out"
    command = ("compare", "--task", f"{PLACE}:Slow", "--seeds", "1", "--device", "cpu", "--out", str(out))
    command += ("--method", ARM, *extra)
    process = started(*command)
    part = "trials" if "--tune" in extra else "runs"
    wait_for(
        lambda: sum(path.read_text().count("\n") for path in out.glob(f"{part}/*/metrics.jsonl")) >= 2, seconds=300
    )
    family = psutil.Process(process.pid).children(recursive=True)
    # as a scheduler does, which signals every process of a job
    for each in [psutil.Process(process.pid), *family]:
        each.send_signal(signal.SIGTERM)
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 143, said
    assert said.strip() == f"{LINE} from {out}" and "note" not in printed
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1])
    if "--jobs" in extra and "--tune" not in extra:
        before = lines(out)
        again = started(*command)
        assert again.communicate(timeout=300) and again.returncode == 0
        assert lines(out) >= before
        carry(tiny_study("Slow", methods=(ARM,), seeds=1).model_copy(update={"name": "Slow"}), tmp_path / "whole")
        assert all_numbers(out) == all_numbers(tmp_path / "whole")


@pytest.mark.grid
def test_a_command_in_the_background_cancels_its_local_jobs(tmp_path):
    pytest.importorskip("submitit")
    out = tmp_path / "out"
    command = ("compare", "--task", f"{PLACE}:Slow", "--seeds", "1", "--device", "cpu", "--out", str(out))
    command += ("--method", ARM, "--engine", "slurm", "--slurm", "executor=local")
    process = started(*command, ignoring={signal.SIGINT})
    wait_for(lambda: any(path.read_text() for path in out.glob("runs/*/metrics.jsonl")))
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=300)
    assert process.returncode == CODES[signal.SIGTERM] and LINE in told
    assert family
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1])
    # they were ended, and did not run to their own end
    assert not list(out.glob("runs/*/result.json"))


def test_what_a_rank_imports_first_leaves_torch_for_later():
    """A rank must hear stops, and set what torch reads once, before torch is imported."""
    code = "import sys, headwise.lab.comparing.command, headwise.lab.engines.rank; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
