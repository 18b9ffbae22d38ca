"""A league of a tiny world: planned, run within a budget, resumed, and grown by an entry that costs its own runs
alone."""

import json
import re
from pathlib import Path

import pytest
from headwise_papers.league import command, files
from headwise_papers.league.command import LeagueRequest, cells_of, named
from headwise_papers.league.drive import carry_out, informative_first, left_of, plan_lines, read_budget
from leagues import ENTRIES, write_source

from headwise.lab.engines.local import HereEngine
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.folder import read_study


class Quiet:
    """Hear nothing but what is said, and count runs."""

    def __init__(self):
        self.said, self.ended = [], []

    def plan(self, total, finished, after=0):
        self.total = total

    def hear(self, order, event):
        if event["event"] == "done":
            self.ended.append(order.configuration)

    def say(self, text):
        self.said.append(text)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """Only the folder of a test brings entries and worlds."""
    monkeypatch.setattr(files, "installed_folders", list)


def request_of(tmp_path, **changes):
    source = tmp_path / "source"
    if not source.exists():
        write_source(source)
    return LeagueRequest(**{"sources": (source,), "trials": 2, "seeds": 2, "out": tmp_path / "out", **changes})


def go(request, deadline=None, clock=None):
    listener, engine = Quiet(), HereEngine()
    cells = cells_of(request, engine, listener)
    told = {} if clock is None else {"clock": clock}
    ended = carry_out(cells, engine, listener, jobs=1, deadline=deadline, **told)
    return cells, listener, ended


def record(tmp_path, world="dots"):
    return json.loads((tmp_path / "out" / world / "league.json").read_text())["entries"]


def test_a_league_is_run_stopped_resumed_and_grown(tmp_path):
    request = request_of(tmp_path)
    plan = "\n".join(plan_lines(cells_of(request, HereEngine(), Quiet()), 2))
    # three entries, two trials and two seeds each, six seconds a run
    assert re.search(r"dots +3 +0 +12 +1\n", plan) and "without an interval in dots: all 3" in plan
    assert not (tmp_path / "out").exists()

    # the clock, asked before every run and after the last one of a cell, passes the deadline after five runs
    ticks = iter(range(100))
    _, listener, ended = go(request, deadline=6, clock=lambda: next(ticks))
    assert ended == "the budget is spent" and len(listener.ended) == 5
    assert [one.arm for one in listener.ended[:4]] == ["baseline"] * 4
    assert [one.purpose for one in listener.ended] == ["trial", "trial", "final", "final", "trial"]

    cells, listener, ended = go(request)
    assert ended == "nothing is missing" and len(listener.ended) == 7
    assert all(not left_of(cell).runs for cell in cells)
    trials = [one for one in listener.ended if one.purpose == "trial"]
    # tuning seeds are apart from final ones, and every entry has as many trials
    assert all(one.seed >= 1000 for one in trials)
    found = record(tmp_path)
    assert {name: len(one["tried"]) for name, one in found.items()} == {"plain": 2, "smaller": 2, "drop-head": 2}
    # the first trial is the entry as it is written, at the world's own rate
    assert (
        found["drop-head"]["tried"][0]["arm"] == "DropHead(p=0.2)" and found["drop-head"]["tried"][0]["rate"] == 0.001
    )
    strength = float(re.search(r"p=([\d.]+)", found["drop-head"]["tried"][1]["arm"])[1])
    assert 0.1 <= strength <= 0.5 and 0.0005 <= found["drop-head"]["tried"][1]["rate"] <= 0.002
    study = read_study(tmp_path / "out" / "dots")
    assert study.arms[0] == "baseline" and len(study.arms) == 3 and not study.missing()
    # a final run read the test split, a trial did not
    every = [json.loads(path.read_text()) for path in (tmp_path / "out" / "dots").glob("trials/*/result.json")]
    assert len(every) == 6 and all(one["metrics"].get("test/accuracy") is None for one in every)

    before = (tmp_path / "out" / "dots" / "runs").stat().st_mtime_ns
    assert go(request)[1].ended == [] and (tmp_path / "out" / "dots" / "runs").stat().st_mtime_ns == before
    write_source(tmp_path / "source", {"drop_key": ("DropKey(p=0.1)", "method", "p = [0.05, 0.3]\n")})
    _, listener, _ = go(request)
    assert len(listener.ended) == 4 and {one.arm.partition("(")[0] for one in listener.ended} == {"DropKey"}
    more = go(request_of(tmp_path, seeds=3))[1].ended
    assert [one.seed for one in more] == [2] * 4

    page, lines = command_page(tmp_path)
    assert page.is_file() and any("drop-head" in line for line in lines)


def command_page(tmp_path):
    from headwise_papers.league.page import write

    return write([tmp_path / "out" / "dots"], tmp_path / "out")


def test_an_entry_that_fails_or_cannot_be_is_a_result_and_the_others_go_on(tmp_path):
    entries = ENTRIES | {
        "breaks": ("baseline | fails=true", "control", ""),
        "nowhere": ("DropHead(p=0.2) @ 7", "method", "p = [0.1, 0.5]\n"),
        "unfit": ("DropHead(p=0.3) | heads=1", "method", ""),
    }
    del entries["smaller"], entries["drop_head"]
    write_source(tmp_path / "source", entries)
    _, listener, ended = go(request_of(tmp_path))
    found = record(tmp_path)
    assert ended == "nothing is missing" and found["plain"]["status"] == "chosen"
    assert found["breaks"]["status"] == "failed" and "this entry breaks" in found["breaks"]["why"]
    assert found["nowhere"]["status"] == "refused" and "7" in found["nowhere"]["why"]
    assert found["unfit"]["status"] == "refused" and "one head" in found["unfit"]["why"] and not found["unfit"]["tried"]
    assert any("breaks in dots failed" in text for text in listener.said)
    cells, listener, _ = go(request_of(tmp_path))
    assert not listener.ended and "failed in dots: breaks" in "\n".join(plan_lines(cells, 1))
    # named again, it is tried once more
    assert go(request_of(tmp_path, again=True))[1].said


def test_what_has_no_interval_comes_first_and_the_plain_model_before_all(tmp_path):
    write_source(tmp_path / "source", worlds=("dots", "more"))
    cells = cells_of(request_of(tmp_path, seeds=8), HereEngine(), Quiet())
    order = informative_first(cells)
    assert [(cell.entry.name, cell.place.world.name) for cell, _ in order[:3]] == [
        ("plain", "dots"),
        ("plain", "more"),
        ("smaller", "dots"),
    ]
    # six seeds can decide; the other two come when every cell has as many
    assert [upto for _, upto in order] == [6] * 6 + [8] * 6


def test_worlds_and_entries_can_be_chosen_and_the_plain_model_is_always_there(tmp_path):
    write_source(tmp_path / "source", worlds=("dots", "more"))
    cells = cells_of(request_of(tmp_path, worlds=("more",), entries=named(["drop-head"])), HereEngine(), Quiet())
    assert [(cell.entry.name, cell.place.world.name) for cell in cells] == [("plain", "more"), ("drop-head", "more")]
    with pytest.raises(StudyError, match=r"--worlds mor: unknown name. Did you mean 'more'\? Known: dots, more"):
        cells_of(request_of(tmp_path, worlds=("mor",)), HereEngine(), Quiet())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": True, "run": True}, "--plan only shows what --run would do"),
        ({"budget": "2h"}, "--budget needs --run"),
        (
            {"folders": (Path("a"),), "run": True},
            "Worlds that are given are only read, while --plan and --run work on --out",
        ),
        ({"run": True, "engine": "dask"}, "--engine 'dask' is not known. Engines: local, ray, slurm"),
        ({"run": True, "budget": "soon"}, "--budget 'soon' is not a duration"),
        ({}, "contains no world of a league"),
    ],
)
def test_a_request_that_cannot_be_is_refused(tmp_path, changes, message):
    with pytest.raises(StudyError, match=re.escape(message)):
        command.run(request_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30min", 1800), ("2h", 7200), ("1.5 h", 5400), ("1d", 86400), ("45", 45)]
)
def test_budgets_are_read(text, seconds):
    assert read_budget(text) == seconds


def test_a_world_that_changed_is_not_mixed_with_what_was_run(tmp_path):
    request = request_of(tmp_path, entries=("plain",))
    ticks = iter(range(9))
    go(request, deadline=1, clock=lambda: next(ticks))
    with pytest.raises(
        StudyError, match=r"contains the world dots with other trials: .*Choose another --out, or delete"
    ):
        cells_of(request_of(tmp_path, trials=3), HereEngine(), Quiet())
    write_source(tmp_path / "source", settings="[settings]\nepochs = 3\n")
    with pytest.raises(StudyError, match="with other settings"):
        cells_of(request, HereEngine(), Quiet())


def test_runs_of_another_version_of_the_task_are_not_mixed_with_new_ones(tmp_path):
    request = request_of(tmp_path, entries=("plain",))
    go(request)
    file = tmp_path / "source" / "dots.py"
    before = file.read_text()
    file.write_text(before + "# a comment\n")
    with pytest.raises(StudyError, match=r"was run with another version of the file of .*Restore that version"):
        cells_of(request, HereEngine(), Quiet())
    file.write_text(before)
    assert cells_of(request, HereEngine(), Quiet())


def test_other_ranges_are_another_search(tmp_path):
    request = request_of(tmp_path, entries=("drop-head",))
    go(request)
    first = record(tmp_path)["drop-head"]
    write_source(tmp_path / "source", {"drop_head": ("DropHead(p=0.2)", "method", "p = [0.15, 0.25]\n")})
    listener = go(request)[1]
    again = record(tmp_path)["drop-head"]
    assert again["digest"] != first["digest"] and {one.arm.partition("(")[0] for one in listener.ended} == {"DropHead"}
    assert 0.15 <= float(re.search(r"p=([\d.]+)", again["tried"][1]["arm"])[1]) <= 0.25
