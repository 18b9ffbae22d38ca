"""The workflow that judges a branch: its shell lines run with a stub of the training and of the forge's command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

WORKFLOW = Path(__file__).parents[2] / "examples" / "judge.yml"
TRAINING = """
import random, sys
seed = int(sys.argv[2])
print("training")
print(random.Random(seed).gauss(3, 0.1) + {shift} + random.Random(f"{shift} {{seed}}").gauss(0, 0.005))
"""


def shell(folder, *command, **variables):
    environment = os.environ | {"PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}"} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("shift", "answer", "code"), [(-0.1, "accept", 0), (0.1, "reject", 1)])
def test_a_branch_is_judged_and_commented(tmp_path, shift, answer, code):
    work, tools = tmp_path / "work", tmp_path / "bin"
    work.mkdir()
    tools.mkdir()
    for name, line in (
        ("headwise", f'exec {sys.executable} -m headwise "$@"'),
        ("python", f'exec {sys.executable} "$@"'),
        ("gh", 'echo "$@" >> ../comments.txt; cat verdict.md >> ../comments.txt'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    assert shell(work, "git", "init", "-q").returncode == 0
    for where in (0.0, shift):
        (work / "train.py").write_text(TRAINING.format(shift=where))
        assert shell(work, "git", "add", "-A").returncode == 0
        assert shell(work, *git, "commit", "-qm", f"shift {where}").returncode == 0
    assert shell(work, "git", "update-ref", "refs/remotes/origin/main", "HEAD~1").returncode == 0
    steps = {step.get("name"): step for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["judge"]["steps"]}
    kept, summary = tmp_path / "environment", tmp_path / "summary.md"
    train = steps["train in pairs until it is decided"]
    assert train["env"] == {"BASE": "${{ github.base_ref }}"} and train["shell"] == "bash"
    # as the forge runs `shell: bash`
    command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", train["run"])
    files = {"GITHUB_ENV": str(kept), "GITHUB_STEP_SUMMARY": str(summary), "BASE": "main"}
    done = shell(work, *command, **files)
    assert done.returncode == 0 and f"### headwise judge: {answer}" in done.stdout, done.stderr
    assert f"### headwise judge: {answer}" in summary.read_text()
    assert kept.read_text() == f"code={code}\n"
    assert shell(work, "bash", "-e", "-c", steps["comment"]["run"], NUMBER="7").returncode == 0
    comments = (tmp_path / "comments.txt").read_text()
    assert comments.startswith("pr comment 7 --body-file verdict.md\n") and answer in comments
    last = shell(work, "bash", "-e", "-c", steps["fail if it is worse, or could not be judged"]["run"], code=str(code))
    assert last.returncode == (1 if code == 1 else 0)
    # a training that fails ends the job: it is no figure
    kept.unlink()
    (work / "train.py").write_text("raise SystemExit('no data')\n")
    (tmp_path / "base").rename(tmp_path / "before")
    assert shell(work, "git", "worktree", "prune").returncode == 0
    failed = shell(work, *command, **files)
    assert failed.returncode == 1 and "no data" in failed.stderr and not kept.exists()
