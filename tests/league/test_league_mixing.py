"""What may not be mixed in a league: other seeds, searches, names and machines; and what a mistake in a call does."""

import json

import pytest
from headwise_papers.league import command, files
from headwise_papers.league.command import LeagueRequest
from headwise_papers.league.follow_up_page import fresh_worlds, pair_worlds
from headwise_papers.league.gains import Worlds
from headwise_papers.league.page import write
from headwise_papers.league.reading import read_worlds
from headwise_papers.league.world_folder import FILE
from leagues import TASK, finished_world, write_source

from headwise_verdict.files.errors import StudyError

KINDS = {"plain": "plain", "decay": "control"}
FIGURES = {
    "plain": [0.50, 0.52, 0.51, 0.53, 0.50, 0.54],
    "decay": [0.52, 0.55, 0.53, 0.54, 0.52, 0.56],
    "good": [0.60, 0.61, 0.63, 0.62, 0.61, 0.64],
}


def world(folder, name="one", figures=FIGURES, kinds=KINDS):
    return finished_world(folder, name, figures, kinds=kinds)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_unit_of_gains_is_the_spread_over_fresh_seeds_too(tmp_path):
    folder = world(tmp_path / "one")
    alone = read_worlds([folder])[0].figures.spread
    # on fresh seeds the plain model fails now and then, which the league's seeds did not show
    world(folder / "fresh", figures=FIGURES | {"plain": [0.51, 0.10, 0.52, 0.53, 0.12, 0.50]})
    (one,) = read_worlds([folder])
    assert alone < 0.02 < 0.1 < one.figures.spread
    assert fresh_worlds([one])[0].figures.spread == one.figures.spread


def test_final_runs_are_not_dropped_and_fresh_seeds_stay_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "installed_folders", list)
    request = {
        "sources": (write_source(tmp_path / "source"),),
        "run": True,
        "out": tmp_path / "out",
        "trials": 1,
        "jobs": 1,
    }
    world(tmp_path / "out" / "dots", "dots")
    with pytest.raises(StudyError, match=r"contains final runs on seeds 0 to 5, and --seeds 3 .* Give --seeds 6"):
        command.run(LeagueRequest(**request, seeds=3))
    world(tmp_path / "out" / "dots" / "fresh", "dots")
    fresh = tmp_path / "out" / "dots" / "fresh" / "study.json"
    edit(fresh, lambda study: study.update(seeds=[6, 7, 8, 9, 10, 11]))
    with pytest.raises(StudyError, match=r"runs on seeds 6 to 11, which would not be fresh with --seeds 8"):
        command.run(LeagueRequest(**request, seeds=8))


def test_follow_ups_of_an_earlier_search_are_left_out_by_name(tmp_path):
    folder = world(tmp_path / "one")
    world(folder / "fresh")
    of_pairs = {name: FIGURES[name] for name in ("plain", "good")} | {"good+decay": FIGURES["good"]}
    world(folder / "pairs", figures=of_pairs, kinds={"plain": "plain", "good+decay": "pair"})
    edit(
        folder / "pairs" / FILE,
        lambda record: record["entries"]["good+decay"].update(parts={"good": "d", "decay": "other ranges"}),
    )
    edit(folder / "fresh" / FILE, lambda record: record["entries"]["good"].update(rate=0.5))
    read = read_worlds([folder])
    assert set(fresh_worlds(read)[0].cells) == {"plain", "decay"}
    assert "good+decay" not in pair_worlds(read)[0].cells
    page, _ = write([folder], tmp_path / "out")
    text = page.read_text()
    assert "the runs on fresh seeds of good are of an earlier search" in text
    assert "the pairs of good+decay are of an earlier search" in text


def test_one_name_for_two_searches_or_kinds_is_refused(tmp_path):
    folders = [world(tmp_path / "one"), world(tmp_path / "two", "two")]
    edit(folders[1] / FILE, lambda record: record["entries"]["good"].update(digest="other ranges"))
    with pytest.raises(
        StudyError, match=r"the entry good has another arm, other ranges or other trials in two than in"
    ):
        read_worlds(folders)
    edit(folders[1] / FILE, lambda record: record["entries"]["good"].update(digest="d", kind="control"))
    with pytest.raises(StudyError, match=r"the entry good has another kind in two than in one"):
        read_worlds(folders)


def test_runs_of_several_machines_are_told(tmp_path):
    folder = world(tmp_path / "one")
    here, there = ({"runs": 9, "versions": {"torch": "2"}, "hardware": {"processor": name}} for name in ("A", "B"))
    edit(folder / "study.json", lambda study: study.update(environments=[here, here]))
    page, _ = write([folder], tmp_path / "out")
    assert "several machines" not in page.read_text()
    edit(folder / "study.json", lambda study: study.update(environments=[here, there]))
    page, _ = write([folder], tmp_path / "out")
    assert "One: its runs are from several machines or versions of libraries" in page.read_text()


def test_a_few_seeds_give_no_interval_and_name_no_winner(tmp_path):
    few = {name: values[:2] for name, values in FIGURES.items()}
    folder = world(tmp_path / "one", figures=few)
    gain = Worlds([read_worlds([folder])[0].figures]).aggregates()["good"].gain
    assert gain.value > 1 and gain.low is None and gain.high is None
    _, lines = write([folder], tmp_path / "out")
    assert lines[0] == "Over 1 world no entry is shown to gain."


def test_the_gain_without_a_world_is_that_of_the_others(tmp_path):
    swapped = FIGURES | {"good": FIGURES["decay"], "decay": FIGURES["good"]}
    read = read_worlds([world(tmp_path / "one"), world(tmp_path / "two", "two", swapped)])
    without = Worlds([one.figures for one in read]).gains_without_each()
    alone = Worlds([read[1].figures]).aggregates()
    assert without["one"] == {name: pytest.approx(one.gain.value) for name, one in alone.items()}
    assert without["one"]["decay"] > without["two"]["decay"]


def test_mistakes_in_a_call_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "installed_folders", list)
    source = write_source(tmp_path / "source")
    with pytest.raises(StudyError, match=r"contains neither entries/ nor worlds/"):
        command.run(LeagueRequest(plan=True, sources=(source / "entries",), out=tmp_path / "out"))
    folder = world(tmp_path / "out" / "one")
    with pytest.raises(StudyError, match=r"--worlds and --entries choose runs"):
        command.run(LeagueRequest(folders=(folder,), worlds=("nonsense",), out=tmp_path / "page"))
    # a world that cannot be read yet does not keep the others from the page
    for name, status, why in (("two", "searching", ""), ("three", "failed", "it broke"), ("four", "chosen", "")):
        other = world(tmp_path / "out" / name, name)
        (other / "study.json").unlink()

        def plain(record, status=status, why=why):
            record["entries"]["plain"].update(status=status, why=why)

        edit(other / FILE, plain)
    command.run(LeagueRequest(out=tmp_path / "out"))
    told = capsys.readouterr().err
    assert "the search of its plain model has not ended" in told
    assert "its plain model failed (it broke). Run it again: headwise league --run --again" in told
    assert "its searches are there and its final runs are not" in told
    assert (tmp_path / "out" / "league.html").is_file()


def test_the_task_of_a_world_may_lie_beside_its_folder(tmp_path):
    source = write_source(tmp_path / "source")
    (source / "my_task.py").write_text(TASK)
    place = source / "worlds" / "dots.toml"
    place.write_text(place.read_text().replace(f"{source / 'dots.py'}:Dots", "my_task.py:Dots"))
    assert files.read_worlds([source])["dots"].built().dim == 8
