"""The storm in small: studies of all kinds killed at random moments, to the numbers of those never stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import storm

# `make storm` strikes a thousand times; thirty, in the grid, take about five minutes on two cores
KILLS = int(os.environ.get("HEADWISE_KILLS", "30"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    # a tuned study has trials, and then the runs of a plain one
    ("kills", "kinds"),
    [(4, ("tuned",)), (KILLS, tuple(storm.KINDS))],
)
@pytest.mark.grid
def test_kills_at_random_moments_change_no_number_and_leave_nothing_behind(tmp_path, kills, kinds):
    if "ray" in kinds:
        pytest.importorskip("ray")
    script = Path(storm.__file__)
    command = [
        sys.executable,
        str(script),
        "--kills",
        str(kills),
        "--kinds",
        ",".join(kinds),
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == kills and set(found["by_kind"]) == set(kinds) and found["compared"] >= 2 * len(kinds), (
        found
    )


class Ended:
    """Stand for a launcher that ended well."""

    pid = 2**22 + 1

    def poll(self):
        return 0

    wait = poll


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Return a storm whose study is ended, and that study and its twin, which was never stopped."""
    from small_studies import carry, tiny_study

    for name in ("found", "whole"):
        carry(tiny_study(epochs=1), tmp_path / name, watch=True)
        (tmp_path / name / ".lock").touch()
    monkeypatch.setattr(storm, "begin", lambda *arguments: Ended())
    return storm.Storm(0, tmp_path), tmp_path / "found", tmp_path / "whole"


def change(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def swap_lines(out):
    path = next(out.glob("runs/*/health.jsonl"))
    first, second, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([second, first, *others]))


def tell_again(out):
    path = next(out.glob("runs/*/health.jsonl"))
    path.write_text(path.read_text() + '{"alert": "logit_growth", "step": 0}\n')


def hold(out):
    from filelock import FileLock

    lock = FileLock(out / ".lock")
    lock.acquire()
    return lock


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda out: None, None),
        (lambda out: change(next(out.glob("runs/*/metrics.jsonl")), '"epoch": 1', '"epoch": 2'), "runs .* differ from"),
        pytest.param(
            lambda out: change(next(out.glob("runs/*/health.jsonl")), '"head": 1', '"head": 0'),
            "runs .* differ from",
            marks=pytest.mark.grid,
        ),
        pytest.param(swap_lines, "runs .* differ from", marks=pytest.mark.grid),
        pytest.param(tell_again, "runs .* differ from", marks=pytest.mark.grid),
        (lambda out: (out / "x.partial").write_text(""), "differ in the files .*x.partial"),
        (hold, "lock is still held"),
    ],
)
def test_the_storm_sees_other_numbers_files_left_behind_and_held_locks(two, harm, words):
    import re

    weather, out, whole = two
    held = harm(out)
    weather.finish("plain", out, whole)
    found = [text for texts in weather.faults.values() for text in texts]
    assert bool(found) == bool(words), found
    assert words is None or re.search(words, found[0])
    if harm is hold:
        held.release()


def test_the_storm_sees_a_process_that_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(storm, "PATIENCE", 0.2)
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    weather = storm.Storm(0, tmp_path)
    weather.expect_nobody("plain", orphan.pid, tmp_path)
    assert "stayed behind" in weather.faults["processes_left"][0] and weather.summary()["processes_left"] == 1
    assert orphan.wait(timeout=300) != 0
