"""`headwise league`: what it runs, prints and writes, and how it ends."""

import re
from pathlib import Path

import pytest
from contests import TASK
from headwise_papers.league import contest_command
from headwise_papers.league.cli import LeagueRequest
from headwise_papers.league.contest_command import run

from headwise_verdict.files.errors import StudyError

ARMS = {
    "plain": ("plain", "baseline"),
    "decay": ("control", "baseline | weight_decay=0.1"),
    "drop-head": ("method", "DropHead(p=0.2)"),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Leave out the worlds of installed packages, which take minutes."""
    monkeypatch.setattr(contest_command, "entry_points", lambda group: {})


@pytest.fixture
def source(tmp_path):
    """Return a user's folder with three contestants and two worlds, of which one cannot be trained."""
    folder = tmp_path / "mine"
    for part in ("arms", "small_worlds"):
        (folder / part).mkdir(parents=True)
    (folder / "dots.py").write_text(TASK)
    for name, (kind, arm) in ARMS.items():
        (folder / "arms" / f"{name}.toml").write_text(f'kind = "{kind}"\narms = ["{arm}"]\nreason = "r"\n')
    for name, task in (("dots", "Dots"), ("absent", "Absent")):
        (folder / "small_worlds" / f"{name}.toml").write_text(
            f'title = "{name}"\nsymptom = "depth"\nfield = "images"\narchitecture = "a"\ntask = "dots.py:{task}"\n'
            'seconds = 30\nreason = "r"\n[eased]\nsteps = 6\n'
        )
    return folder


def test_a_plan_names_what_is_missing_and_writes_nothing(source, tmp_path, capsys):
    run(LeagueRequest(out=tmp_path / "out", sources=(source,), worlds=("dots",), plan=True))
    assert re.fullmatch(r"dots: not run, runs 0/\d+, about \d+ core-minutes left\n", capsys.readouterr().out)
    assert not (tmp_path / "out").exists()


def test_runs_resume_where_the_minutes_ended_and_the_page_tells_them(source, tmp_path, capsys, monkeypatch):
    request = LeagueRequest(out=tmp_path / "out", sources=(source,), worlds=("dots",), premises=True)
    # the clock ends the first call after 3 runs
    over = iter([False] * 3 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(contest_command, "_is_over", lambda *_, **__: next(over))
        run(request)
    first = (tmp_path / "out" / "dots" / "runs.csv").read_text()
    assert first.count("\n") == 1 + 3
    run(request)
    told, whole = capsys.readouterr().out, (tmp_path / "out" / "dots" / "runs.csv").read_text()
    assert whole.startswith(first) and len(whole) > len(first)
    assert "dots: learned: fewer errors than a constant" in told and re.search(r"(holds|does not hold)\n", told)
    run(LeagueRequest(out=tmp_path / "out", sources=(source,), worlds=("dots",), page=True))
    page = (tmp_path / "out" / "league.md").read_text()
    assert page.startswith("# The league\n") and "dots" in page


def test_a_world_that_cannot_be_run_leaves_the_others_and_ends_with_1(source, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(LeagueRequest(out=tmp_path / "out", sources=(source,), minutes=0))
    printed = capsys.readouterr()
    assert ended.value.code == 1 and re.search("error: absent: .*Absent", printed.err)
    # the other had its turn: its facts are measured
    assert (tmp_path / "out" / "dots" / "world.json").exists()


def test_ctrl_c_ends_with_130_and_the_line_that_tells_how_to_go_on(source, tmp_path, capsys, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(contest_command, "carry_out", stopped)
    with pytest.raises(SystemExit) as ended:
        run(LeagueRequest(out=tmp_path / "out", sources=(source,), worlds=("dots",)))
    assert ended.value.code == 130 and "The same command resumes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"plan": True, "page": True}, "give one of the three"),
        ({"worlds": ("dot",)}, r"no world 'dot'. Did you mean 'dots'\? Known: "),
        ({"device": "tpu"}, "--device 'tpu' is not known"),
        ({"sources": (Path("nowhere"),)}, "--source nowhere contains neither arms/ nor small_worlds/"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(source, tmp_path, changes, told):
    with pytest.raises(StudyError, match=told):
        run(LeagueRequest(**{"out": tmp_path / "out", "sources": (source,)} | changes))
    assert not (tmp_path / "out").exists()
