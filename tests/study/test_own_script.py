"""What the guide promises: an existing script becomes a study by ten lines, is killed and resumed, on Slurm too."""

import contextlib
import json
import runpy
import signal
import sys
from pathlib import Path

import psutil
import pytest
from test_engines import headwise, wait_for
from test_script import source  # noqa: F401

from headwise.lab.files import script_run as files
from headwise.lab.training import script_run
from headwise_verdict.reporting.numbers import study_of_numbers
from headwise_verdict.results.analysis import analyse

SCRIPT = Path(__file__).with_name("own_script.py")
SIZE = ["--epochs", "3"]


def test_an_existing_script_has_eight_changed_lines():
    lines = SCRIPT.read_text().splitlines()
    assert sum(line.endswith("# headwise") for line in lines) == 8 and len(lines) > 150


@pytest.mark.grid
def test_it_is_killed_and_resumed_on_slurm_and_its_numbers_give_its_report(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    out = tmp_path / "out"
    command = ["compare", "--script", f"{sys.executable} {SCRIPT} {' '.join(SIZE)} --pause 0.3"]
    command += ["--outcome", "accuracy:higher:%", "--outcome", "loss:lower:nats", "--seeds", "1", "--out", str(out)]
    command += ["--method", "RelaxedAttention(gamma=0.3)", "--engine", "slurm", "--slurm", "executor=local"]
    process = headwise(*command, "--jobs", "2", "--no-rehearsal")
    wait_for(lambda: len(list(out.glob("runs/*/own/last.pt"))) == 2)
    # the whole machine fails: the command, its jobs and their scripts
    family = psutil.Process(process.pid).children(recursive=True)
    numbers = [json.loads(path.read_text())["process"] for path in out.glob("runs/*/told/1.json")]
    for number in (process.pid, *(one.pid for one in family), *numbers):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(number).send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(out.glob("runs/*/result.json"))

    process = headwise(*command, "--jobs", "2", "--no-rehearsal")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, said + errors
    assert len(list(out.glob("runs/*/told/2.json"))) == 2
    assert all("going on from epoch" in path.read_text() for path in out.glob("runs/*/output.log"))

    # a run that was cut ends with the numbers of the script alone
    monkeypatch.setattr(files, "_current", [])
    monkeypatch.setattr(script_run, "_runs", [])
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SIZE])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = [json.loads(path.read_text()) for path in out.glob("runs/*/result.json")]
    (baseline,) = (result["metrics"] for result in results if result["arm"] == "baseline")
    assert {name: baseline[f"test/{name}"] for name in alone} == alone

    # its numbers, given as a table, are judged as it was
    study_of_numbers(out / "runs.csv", ["accuracy:higher:%", "loss:lower:nats"], "baseline", tmp_path / "table")
    found, again = (analyse(folder).model_dump()["arms"] for folder in (out, tmp_path / "table"))
    assert [arm["label"] for arm in found] == [arm["label"] for arm in again]
    for one, other in zip(found, again):
        assert {name: one["metrics"][name] for name in other["metrics"]} == other["metrics"]
        assert {name: one["differences"].get(name) for name in other["differences"]} == other["differences"]
