"""The program of everything that a GPU is for, walked through at toy size on the CPU."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import headwise
from headwise.lab.studies.registry import PAPERS

ROOT = Path(__file__).parents[2]


def run(*options):
    command = [sys.executable, "benchmarks/on_a_gpu.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)


def ended(folder):
    return {part["name"]: part["ended"] for part in json.loads((folder / "done.json").read_text()).values()}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_dry_run_walks_through_all_parts_and_resumes(tmp_path):
    first = run("--dry", "--out", str(tmp_path), "--only", "studies-blog-cifar10")
    assert first.returncode == 0, first.stdout + first.stderr
    assert ended(tmp_path) == {"studies-blog-cifar10": "done"}
    rest = run("--dry", "--out", str(tmp_path))
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert set(ended(tmp_path).values()) == {"done"} and len(ended(tmp_path)) >= 8
    # what is done is not done again
    assert "studies-blog-cifar10 " not in rest.stdout
    assert all((tmp_path / name / "report.html").is_file() for name in ("blog-cifar10", "neutreno-cifar", "sigma-lm"))
    assert not run("--dry", "--out", str(tmp_path)).stdout


def test_a_part_over_its_time_is_stopped_told_and_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import on_a_gpu

    waits = on_a_gpu.Part("waits", 1, "", "-c 'import time; time.sleep(600)'")
    monkeypatch.setattr(on_a_gpu, "PARTS", (waits,))
    monkeypatch.setattr(on_a_gpu, "complete", lambda: None)
    monkeypatch.setattr(on_a_gpu, "describe_checkout", lambda: None)
    monkeypatch.setattr(sys, "argv", ["on_a_gpu.py", "--dry", "--out", str(tmp_path)])
    for _ in range(2):
        on_a_gpu.main()
        assert re.search(r"waits +\d+\.\d s  stopped", capsys.readouterr().out)
    assert ended(tmp_path) == {"waits": "stopped"}


def test_files_of_the_user_are_not_overwritten(tmp_path):
    (tmp_path / "done.json").write_text("mine")
    refused = run("--dry", "--out", str(tmp_path), "--only", "tests")
    assert refused.returncode == 1 and "holds done.json, which headwise did not write" in refused.stderr
    assert (tmp_path / "done.json").read_text() == "mine"


def test_runs_share_a_device_by_mps_where_there_is_one(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import on_a_gpu

    calls = tmp_path / "calls"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\necho "$* $CUDA_MPS_PIPE_DIRECTORY" >> {calls}\n[ -z "$1" ] && cat >> {calls}\nexit 0\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(on_a_gpu, "OUT", tmp_path)
    with on_a_gpu.shared_device(True):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps" / "CUDA_MPS_PIPE_DIRECTORY")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and "by MPS: yes" in capfd.readouterr().out
    assert calls.read_text().startswith("-d ") and calls.read_text().endswith("quit\n")
    with on_a_gpu.shared_device(False):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_studies_are_found_by_name_where_nothing_is_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import on_a_gpu

    def none_is_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(on_a_gpu, "CHECKOUT", tmp_path)
    monkeypatch.setattr(on_a_gpu.importlib.metadata, "version", none_is_installed)
    on_a_gpu.describe_checkout()
    found = {each.metadata["Name"]: each for each in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert found.keys() == {"headwise", "headwise-verdict", "headwise-papers"}
    assert {each.version for each in found.values()} == {headwise.__version__}
    studies = {point.name for point in found["headwise-papers"].entry_points if point.group == "headwise.studies"}
    assert studies == set(PAPERS)
    asked = {part.command.split()[3] for part in on_a_gpu.PARTS if part.name.startswith("studies-")}
    assert asked <= studies
    assert str(tmp_path) in on_a_gpu.environment()["PYTHONPATH"].split(os.pathsep)


def test_the_wheels_bring_what_the_studies_require_beside_torch_and_transformers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import on_a_gpu

    lines = (ROOT / "requirements" / "gpu-wheels.txt").read_text().splitlines()
    brought = {canonicalize_name(line) for line in lines if line and not line.startswith("#")}
    by_import = importlib.metadata.packages_distributions()
    needed = {canonicalize_name(by_import[name][0]) for name in on_a_gpu.NEEDED}
    # older versions of scikit-learn do without narwhals, which altair needs
    there = required({"torch", "transformers"} | (needed - brought)) - {"narwhals"}
    assert required(needed) - there <= brought <= required(needed)


def required(names):
    """Return packages and all that they require here, without extras."""
    found, left = set(), list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            wanted = [Requirement(text) for text in importlib.metadata.requires(name) or []]
            left += [
                canonicalize_name(one.name) for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})
            ]
    return found


@pytest.mark.grid
def test_the_counted_minutes_are_current():
    command = [sys.executable, "benchmarks/gpu_minutes.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_without_a_gpu_it_says_what_can_be_done():
    refused = run("--only", "tests")
    assert refused.returncode == 1 and "--dry walks through all parts on the CPU" in refused.stderr
    listed = run("--list")
    assert "studies-blog-cifar100" in listed.stdout and "not run" in listed.stdout


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({1: 100.0, 2: 104.0, 3: 90.0}, 1),
        ({1: 100.0, 2: 180.0, 3: 185.0, 6: 240.0}, 6),
        # each step is worth less than 5 %, and both together more
        ({1: 100.0, 2: 104.0, 3: 108.0}, 3),
    ],
)
def test_the_fewest_runs_side_by_side_that_no_larger_number_beats_are_chosen(monkeypatch, rates, best):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import side_by_side

    assert side_by_side.best(rates) == best


def test_the_number_of_runs_side_by_side_is_measured_once_and_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import on_a_gpu

    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, 'steps\n{"rates": {"1": 10.0, "2": 18.0}, "best": 2}\n', "")

    monkeypatch.setattr(on_a_gpu.subprocess, "run", run)
    monkeypatch.setenv("PATH", "")
    assert [on_a_gpu.measured_jobs(tmp_path, dry=True) for _ in range(2)] == [2, 2] and len(asked) == 1
    assert (
        capfd.readouterr().out.count("runs side by side: 2; steps a second by their number: 1 make 10, 2 make 18") == 2
    )


def test_where_it_cannot_be_measured_runs_go_one_after_the_other(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import on_a_gpu

    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no memory\n")
    monkeypatch.setattr(on_a_gpu.subprocess, "run", lambda *_, **__: failed)
    assert on_a_gpu.measured_jobs(tmp_path, dry=True) == 1 and "no memory" in capfd.readouterr().out
    assert not (tmp_path / "side-by-side.json").exists()
