"""Finished worlds are read back: verdicts, the best control, the page, its tables and figures."""

import csv
import io
import re

import numpy as np
import pytest
from headwise_papers.league.charts import undominated
from headwise_papers.league.page import write
from headwise_papers.league.reading import best_control, read_worlds
from headwise_papers.league.world_folder import read
from leagues import finished_world

from headwise_verdict.files.errors import StudyError

KINDS = {"plain": "plain", "decay": "control", "dropout": "control"}


def figures(seed, gains, seeds=8):
    rng = np.random.default_rng(seed)
    plain = 0.6 + 0.02 * rng.normal(size=seeds)
    entries = {
        name: None if gain is None else [float(v) for v in plain + gain + 0.004 * rng.normal(size=seeds)]
        for name, gain in gains.items()
    }
    return {"plain": [float(v) for v in plain], **entries}


@pytest.fixture
def folders(tmp_path):
    cost = {"good": 1.5, "bad": 1.0, "decay": 1.0}
    validation = {"plain": 0.60, "decay": 0.66, "dropout": 0.61}
    gains = {"decay": 0.03, "dropout": 0.0, "good": 0.06, "bad": -0.05}
    one = finished_world(tmp_path / "one", "one", figures(0, gains), kinds=KINDS, validation=validation, cost=cost)
    two = finished_world(
        tmp_path / "two", "two", figures(1, gains | {"bad": None}), kinds=KINDS, validation=validation, cost=cost
    )
    return [one, two]


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_verdicts_against_plain_and_against_the_best_control(folders):
    one, two = read_worlds(folders)
    verdicts = {name: cell.verdict for name, cell in one.cells.items()}
    assert (
        verdicts["plain"] == "plain"
        and verdicts["good"] == "better"
        and verdicts["bad"] == "worse"
        and verdicts["decay"] == "better"
    )
    assert two.cells["bad"].verdict == "failed" and two.cells["bad"].runs == 0
    # validation data chose decay; the method is held against it, pair by pair
    assert one.control == "decay" and one.cells["good"].to_control.verdict == "better"
    pairs = [a - b for a, b in zip(one.figures.entries["good"], one.figures.entries["decay"])]
    assert one.cells["good"].to_control.mean == pytest.approx(np.mean(pairs))
    assert one.cells["good"].cost == pytest.approx(1.5) and one.cells["good"].others == {
        "test/calibration": pytest.approx(0.1)
    }


def test_the_best_control_is_chosen_by_validation_in_the_good_direction(folders):
    record = read(folders[0])
    assert best_control(record, True) == "decay" and best_control(record, False) == "dropout"
    assert best_control(record.model_copy(update={"entries": {}}), True) == ""


def test_the_page_tells_what_was_found_with_intervals(folders, tmp_path):
    page, lines = write(folders, tmp_path / "out")
    text = page.read_text()
    assert "▲" in text and "×" in text and "it broke" in text and "resamples of the seeds" in text
    assert re.match(
        r"Over 2 worlds these gain by their interval, highest first: of the methods good \d\.\d\d \[\d.*of the "
        r"controls decay",
        lines[0],
    )
    assert "fresh seeds" in lines[0]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".headwise",
        *("league.html", "league.csv", "runs.csv", "trials.csv", "aggregate.csv", "left_out.csv", "without.csv"),
        *("gains.svg", "cost.svg", "profiles.svg", "forest-one.svg", "forest-two.svg", "one.json", "two.json"),
    }
    cells = rows_of(tmp_path / "out" / "league.csv")
    assert len(cells) == 10 and {row["verdict"] for row in cells if row["entry"] == "good"} == {"better"}
    broken = next(row for row in cells if row["entry"] == "bad" and row["world"] == "two")
    assert broken["status"] == "failed" and broken["difference"] == broken["gain"] == "" and broken["why"] == "it broke"
    aggregate = rows_of(tmp_path / "out" / "aggregate.csv")
    assert [row["entry"] for row in aggregate] == ["good", "decay", "dropout", "bad"]
    assert float(aggregate[0]["gain_low"]) < float(aggregate[0]["gain"]) < float(aggregate[0]["gain_high"])
    assert [row["worlds"] for row in aggregate] == ["2", "2", "2", "1"] and aggregate[0]["rank"] == "1.0"
    assert [(row["better_in"], row["worse_in"]) for row in aggregate] == [
        ("2", "0"),
        ("2", "0"),
        ("0", "0"),
        ("0", "1"),
    ]


def test_a_diverged_or_missing_run_is_no_number_of_its_own(tmp_path):
    made = figures(0, {"good": 0.05})
    made["good"][3] = None
    world = read_worlds([finished_world(tmp_path / "one", "one", made, kinds=KINDS)])[0]
    assert world.cells["good"].runs == 7 and np.isnan(world.figures.entries["good"][3])
    page, _ = write([tmp_path / "one"], tmp_path / "out")
    assert "1 final run missing" in page.read_text()


def test_lower_figures_are_gains_where_lower_is_better(tmp_path):
    world = read_worlds(
        [finished_world(tmp_path / "one", "one", figures(0, {"good": -0.05}), kinds=KINDS, higher=False)]
    )[0]
    assert (
        world.cells["good"].verdict == "better" and np.mean(world.figures.entries["good"] - world.figures.plain) > 0.04
    )


def test_folders_that_are_no_worlds_of_one_league_are_refused(folders, tmp_path):
    with pytest.raises(StudyError, match=r"the world one was given twice"):
        read_worlds([folders[0], folders[0]])
    with pytest.raises(StudyError, match=r"contains no league.json"):
        read_worlds([tmp_path])
    (folders[1] / "study.json").unlink()
    with pytest.raises(StudyError, match="its searches are there and its final runs are not"):
        read_worlds(folders)


def test_what_none_beats_in_both_is_named():
    points = {"cheap": (1.0, 0.1), "good": (1.5, 0.9), "worse": (1.5, 0.5), "dear": (2.0, 0.9), "twin": (1.0, 0.1)}
    assert undominated(points) == {"cheap", "good", "twin"}


@pytest.mark.grid
def test_a_world_in_one_file_gives_the_same_page_as_its_folder(folders, tmp_path):
    finished_world(folders[0] / "fresh", "one", figures(2, {"decay": 0.02, "good": 0.05}), kinds=KINDS)
    write(folders, tmp_path / "of_folders")
    files = sorted((tmp_path / "of_folders").glob("*.json"))
    assert len(files) == len(folders)
    order = [read_worlds([file])[0].record.world for file in files]
    assert order == [world.record.world for world in read_worlds(folders)]
    write(files, tmp_path / "of_files")
    again = sorted(path.name for path in (tmp_path / "of_files").iterdir())
    assert again == sorted(path.name for path in (tmp_path / "of_folders").iterdir())
    for name in again:
        if not name.endswith((".svg", ".html")):
            assert (tmp_path / "of_files" / name).read_bytes() == (tmp_path / "of_folders" / name).read_bytes(), name


def test_a_file_that_is_no_world_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"format": 1}')
    with pytest.raises(StudyError, match=r"other\.json is not the file of a league's world"):
        read_worlds([tmp_path / "other.json"])
