"""What follows a league: winners on fresh seeds, pairs, and the plan of a league that was begun."""

import csv
import json

import numpy as np
import pytest
from headwise_papers.league import command, files
from headwise_papers.league.command import LeagueRequest
from headwise_papers.league.files import Entry, read_entries
from headwise_papers.league.follow_up import first_in, pair_of, pairs_of, recommended
from headwise_papers.league.follow_up_page import pair_rows, pair_worlds
from headwise_papers.league.gains import Worlds
from headwise_papers.league.reading import read_worlds
from leagues import finished_world, write_source

from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.folder import read_study

ENTRIES = {
    "plain": ("baseline", "plain", ""),
    "smaller": ("baseline | dim=4", "control", ""),
    "drop_head": ("DropHead(p=0.2)", "method", "p = [0.1, 0.5]\n"),
    "drop_key": ("DropKey(p=0.1)", "method", "p = [0.05, 0.3]\n"),
}


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """Only the folder of a test brings entries and worlds."""
    monkeypatch.setattr(files, "installed_folders", list)


def without_times(path):
    return [{**row, "cost": ""} for row in csv.DictReader(path.read_text().splitlines())]


@pytest.mark.grid
def test_the_highest_run_again_on_fresh_seeds_and_pairs_are_entries(tmp_path, capsys):
    request = {"sources": (write_source(tmp_path / "source", ENTRIES),), "trials": 1, "seeds": 2}
    request |= {"out": tmp_path / "out", "jobs": 1}
    command.run(LeagueRequest(**request, run=True, fresh=1))
    printed = capsys.readouterr()
    assert "on fresh seeds: " in printed.out + printed.err
    fresh = read_study(tmp_path / "out" / "dots" / "fresh")
    # the plain model, the highest method and the highest control; seeds that no final run had
    assert len(fresh.arms) == 3 and fresh.seeds == [2, 3] and not fresh.missing()
    league = json.loads((tmp_path / "out" / "dots" / "league.json").read_text())["entries"]
    assert set(fresh.arms) <= {one["chosen"] for one in league.values()}
    page = (tmp_path / "out" / "league.html").read_text()
    assert "On fresh seeds" in page and "gain in the league" in page
    of_folder = (tmp_path / "out" / "fresh_cells.csv").read_text()
    assert {row["entry"] for row in csv.DictReader(of_folder.splitlines())} >= {"plain", "smaller"}

    # the file of a world is enough: nothing of the league itself is trained again
    elsewhere = {**request, "out": tmp_path / "elsewhere", "folders": (tmp_path / "out" / "dots.json",)}
    command.run(LeagueRequest(**elsewhere, run=True, fresh=1))
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "dots").iterdir()) == [".headwise", "fresh"]
    for name in ("fresh_runs.csv", "fresh_cells.csv", "league.csv"):
        assert without_times(tmp_path / "elsewhere" / name) == without_times(tmp_path / "out" / name)
    capsys.readouterr()

    # a league that was begun can be planned
    command.run(LeagueRequest(**request, plan=True))
    assert "without an interval" not in capsys.readouterr().out

    # what a step takes beside the plain model's stands on the page
    command.run(LeagueRequest(out=tmp_path / "out", sources=request["sources"], trials=1, seeds=2, time_steps=True))
    times = json.loads((tmp_path / "out" / "dots" / "step_times.json").read_text())
    assert set(times) == set(league) and times["plain"] == 1 and all(ratio > 0 for ratio in times.values())
    cells = csv.DictReader((tmp_path / "out" / "league.csv").read_text().splitlines())
    assert {row["entry"]: float(row["cost"]) for row in cells} == times
    # timing one entry again keeps the times of the others
    one = {"sources": request["sources"], "trials": 1, "seeds": 2, "entries": ("smaller",)}
    command.run(LeagueRequest(out=tmp_path / "out", **one, time_steps=True))
    again = json.loads((tmp_path / "out" / "dots" / "step_times.json").read_text())
    assert set(again) == set(times) and again["drop-head"] == times["drop-head"]

    # pairs are trained next to a plain model of their own, and change no figure of the entries
    before = (tmp_path / "out" / "league.csv").read_text()
    command.run(LeagueRequest(**request, run=True, pairs=2))
    assert (tmp_path / "out" / "league.csv").read_text() == before
    rows = list(csv.DictReader((tmp_path / "out" / "pair_cells.csv").read_text().splitlines()))
    # the control does not help here
    assert [(row["entry"], row["runs"]) for row in rows] == [("plain", "2"), ("drop-head+drop-key", "2")]
    stored = json.loads((tmp_path / "out" / "dots" / "pairs" / "league.json").read_text())["entries"]
    assert stored["drop-head+drop-key"]["parts"] == {name: league[name]["digest"] for name in ("drop-head", "drop-key")}
    pairs = read_study(tmp_path / "out" / "dots" / "pairs")
    assert pairs.seeds == [0, 1] and not pairs.missing()
    assert "over the first" in (tmp_path / "out" / "league.html").read_text()

    # given the file of a world, only the pairs are trained, and the file has them
    elsewhere = {**request, "out": tmp_path / "pairs-elsewhere", "folders": (tmp_path / "elsewhere" / "dots.json",)}
    command.run(LeagueRequest(**elsewhere, run=True, pairs=2))
    assert sorted(path.name for path in (tmp_path / "pairs-elsewhere" / "dots").iterdir()) == [".headwise", "pairs"]
    command.run(LeagueRequest(folders=(tmp_path / "pairs-elsewhere" / "dots.json",), out=tmp_path / "page"))
    for out in ("pairs-elsewhere", "page"):
        for name in ("pairs.csv", "pair_runs.csv"):
            assert (tmp_path / out / name).read_text() == (tmp_path / "out" / name).read_text()


def test_a_pair_is_measured_from_the_plain_model_it_was_trained_next_to(tmp_path):
    kinds = {"plain": "plain", "decay": "control"}
    worlds = []
    # another processor: its figures of the same seeds are lower by 0.1, and it did not finish the last seed
    for name, lower in (("one", 0.0), ("two", 0.1)):
        worlds.append(finished_world(tmp_path / name, name, FIGURES, kinds=kinds))
        last = len(FIGURES["plain"]) - 1
        of_pairs = {
            "plain": [value - lower for value in FIGURES["plain"]],
            "good+lower": [
                None if lower and seed == last else value + 0.05 - lower for seed, value in enumerate(FIGURES["good"])
            ],
        }
        finished_world(
            worlds[-1] / "pairs", name, of_pairs, kinds={"plain": "plain", "good+lower": "pair"}, validation={}
        )
    alone = read_worlds(worlds)
    rows = {(row.world, row.pair): row for row in pair_rows(pair_worlds(alone))}
    assert list(rows) == [("all", "good+lower"), ("one", "good+lower"), ("two", "good+lower")]
    spread = np.std(FIGURES["plain"], ddof=1)
    for row in rows.values():
        assert row.over_first.value == pytest.approx(0.05 / spread)
        assert row.over_second.value == pytest.approx(0.15 / spread, rel=0.02)
        assert row.worlds == (2 if row.world == "all" else 1)
    gains = Worlds([world.figures for world in alone]).aggregates()
    assert rows["all", "good+lower"].first == gains["good"].gain
    # a family of their own: the verdicts of the entries do not change
    assert all("good+lower" not in world.cells for world in alone)
    assert "good+lower" not in gains


def test_a_worlds_best_control_is_paired_where_it_helps(tmp_path):
    kinds, validation = {"plain": "plain", "decay": "control"}, {"decay": 0.6}
    helps = finished_world(tmp_path / "one", "one", FIGURES, kinds=kinds, validation=validation)
    useless = FIGURES | {"decay": FIGURES["plain"]}
    read = read_worlds([helps, finished_world(tmp_path / "two", "two", useless, kinds=kinds, validation=validation)])
    entries = {
        "good": entry("good", "DropHead(p=0.2)", p=(0.1, 0.5)),
        "lower": entry("lower", "DropKey(p=0.3)", p=(0.1, 0.5)),
        "useless": entry("useless", "XSA()"),
        "decay": entry("decay", "baseline | weight_decay=0.1", weight_decay=(0.01, 1.0)),
    }
    pairs = pairs_of(read, entries, 2, print)
    assert [one.name for one in pairs["one"]] == ["good+lower", "good+decay", "lower+decay"]
    assert [one.name for one in pairs["two"]] == ["good+lower"]
    # of named entries only
    named = {name: entries[name] for name in ("good", "useless")}
    assert [one.name for one in pairs_of(read, named, 5, print)["one"]] == ["good+useless"]
    # what cannot be paired is told, and the others are
    told = []
    entries["lower"] = entry("lower", "DropHead(p=0.3)", p=(0.1, 0.5))
    pairs = pairs_of(read, entries, 2, told.append)
    assert [one.name for one in pairs["one"]] == ["good+decay", "lower+decay"] and "both search DropHead.p" in told[0]


def test_a_pair_is_searched_over_both_strengths(tmp_path):
    known = read_entries([write_source(tmp_path / "source", ENTRIES)])
    pair = pair_of(known["drop-head"], known["drop-key"])
    assert pair.arm == "DropHead(p=0.2) + DropKey(p=0.1)" and pair.kind == "pair"
    assert pair.search == {"learning_rate": (0.5, 2.0), "DropHead.p": (0.1, 0.5), "DropKey.p": (0.05, 0.3)}
    with_control = pair_of(known["drop-head"], known["smaller"])
    assert with_control.arm == "DropHead(p=0.2) | dim=4"
    (tmp_path / "source" / "entries" / "both.toml").write_text(
        'arm = "DropHead() + DropKey()"\nkind = "pair"\nreason = "a test"\n[search]\nlearning_rate = [0.5, 2.0]\n'
    )
    with pytest.raises(StudyError, match="Pairs need no file"):
        read_entries([tmp_path / "source"])


def entry(name, arm, worlds=(), **search):
    return Entry(
        name=name,
        arm=arm,
        kind="method",
        reason='a "test"',
        worlds=worlds,
        search={"learning_rate": (0.5, 2.0), **search},
    )


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            entry("a", "DropHead(p=0.2)", p=(0.1, 0.5)),
            entry("b", "DropHead(p=0.3)", p=(0.1, 0.5)),
            "both search DropHead.p",
        ),
        (entry("a", "DropHead(p=0.2) @ 0"), entry("b", "DropKey(p=0.3)"), "names where it acts"),
        (entry("a", "XSA()", ("x",)), entry("b", "DropKey(p=0.3)", ("y",)), "no world in common"),
    ],
)
def test_what_is_no_pair_is_refused(one, other, message):
    with pytest.raises(StudyError, match=message):
        pair_of(one, other)


def test_fresh_seeds_and_pairs_are_asked_for_where_they_can_be(tmp_path):
    for follow_up in ({"fresh": 2}, {"pairs": 2}):
        with pytest.raises(StudyError, match="need --run"):
            command.run(LeagueRequest(out=tmp_path, **follow_up))
    with pytest.raises(StudyError, match="are only read"):
        command.run(LeagueRequest(out=tmp_path, run=True, folders=(tmp_path / "one.json",)))
    with pytest.raises(StudyError, match="Give it alone"):
        command.run(LeagueRequest(out=tmp_path, run=True, time_steps=True))
    with pytest.raises(StudyError, match="contains no world"):
        command.run(LeagueRequest(out=tmp_path, time_steps=True))


FIGURES = {
    "plain": [0.50, 0.52, 0.51, 0.53, 0.50, 0.54],
    "decay": [0.60, 0.62, 0.63, 0.63, 0.61, 0.64],
    "best_validation": [0.50, 0.53, 0.51, 0.53, 0.51, 0.54],
    "good": [0.70, 0.71, 0.73, 0.72, 0.71, 0.74],
    "lower": [0.60, 0.61, 0.63, 0.62, 0.61, 0.64],
    "useless": [0.50, 0.51, 0.52, 0.53, 0.50, 0.53],
}


def test_each_world_runs_what_it_recommends_and_its_best_control_again(tmp_path):
    kinds = {"plain": "plain", "decay": "control", "best_validation": "control"}
    validation = {"decay": 0.5, "best_validation": 0.9}
    one = finished_world(tmp_path / "one", "one", FIGURES, kinds=kinds, validation=validation)
    swapped = FIGURES | {"good": FIGURES["useless"], "useless": FIGURES["good"]}
    other = finished_world(tmp_path / "other", "other", swapped, kinds=kinds, validation=validation)
    read = read_worlds([one, other])
    assert first_in(read[0]) == ["good", "decay", "best_validation"]
    assert first_in(read[1]) == ["useless", "decay", "best_validation"]
    again = recommended(read, 1)
    assert again == {
        "one": ["lower", "decay", "good", "best_validation"],
        "other": ["lower", "decay", "useless", "best_validation"],
    }
