"""Kept worlds of the league: adding one loses none of the others, and a league resumes from what is kept."""

import json
import tarfile
from pathlib import Path

import pytest
from headwise_papers.league.page import write
from headwise_papers.league.reading import read_worlds
from headwise_papers.league.world_folder import FILE, read
from leagues import finished_world

from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.folder import read_study

KINDS = {"plain": "plain", "decay": "control"}
FIGURES = {
    "plain": [0.50, 0.52, 0.51, 0.53, 0.50, 0.54],
    "decay": [0.52, 0.55, 0.53, 0.54, 0.52, 0.56],
    "good": [0.60, 0.61, 0.63, 0.62, 0.61, 0.64],
}


@pytest.fixture
def which(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    import which_method

    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(which_method, "KEPT", kept)
    monkeypatch.setattr(which_method, "RUNS", kept / "runs")
    return which_method


def world(tmp_path, name):
    return finished_world(tmp_path / "league" / name, name, FIGURES, kinds=KINDS)


def test_a_world_that_is_added_loses_neither_the_others_nor_their_runs(which, tmp_path):
    which.keep([world(tmp_path, "recall")])
    # a world that is not finished has packed runs alone
    which.archive([world(tmp_path, "speech")])
    which.keep([world(tmp_path, "words")])
    assert {path.stem for path in which.KEPT.glob("*.json")} == {"recall", "words"}
    packed = {path.name.removesuffix(".tar.xz") for path in which.RUNS.iterdir()}
    assert packed == {"recall", "speech", "words"}
    assert {row["world"] for row in which.read(which.KEPT).tables["league"]} == {"recall", "words"}


def test_a_league_resumes_from_its_packed_runs(which, tmp_path):
    folder = world(tmp_path, "recall")
    run = next((folder / "runs").iterdir())
    (run / "checkpoint.safetensors").write_bytes(b"weights")
    which.keep([folder])
    with tarfile.open(which.RUNS / "recall.tar.xz") as packed:
        assert not [name for name in packed.getnames() if name.endswith(".safetensors")]
    which.restore(tmp_path / "again")
    assert not read_study(tmp_path / "again" / "recall").missing()
    again, before = (read_worlds([place])[0] for place in (tmp_path / "again" / "recall", folder))
    assert again.file() == before.file()


def test_runs_on_fresh_seeds_are_kept_with_the_file_of_a_world_and_restored(which, tmp_path):
    which.keep([world(tmp_path, "recall")])
    # as `headwise league recall.json --run --fresh 3 --out followed` leaves them
    followed = tmp_path / "followed"
    world(followed, "recall").rename(followed / "fresh")
    (followed / "recall").mkdir()
    (followed / "fresh").rename(followed / "recall" / "fresh")
    write([which.KEPT / "recall.json"], followed, follow_up_in=followed)
    which.keep([followed / "recall.json"])
    assert (which.KEPT / "fresh_cells.csv").is_file()
    which.restore(tmp_path / "again")
    assert not read_study(tmp_path / "again" / "recall" / "fresh").missing()
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [".headwise", "recall"]


def test_fresh_seeds_have_an_archive_of_their_own_wherever_the_league_is(which, tmp_path):
    folder = world(tmp_path / "fresh", "recall")
    world(tmp_path / "other", "recall").rename(folder / "fresh")
    which.keep([folder])
    packed = {}
    for path in which.RUNS.iterdir():
        with tarfile.open(path) as archive:
            packed[path.name] = archive.getnames()
    assert set(packed) == {"recall.tar.xz", "recall-fresh.tar.xz"}
    of_fresh = [name.startswith("recall/fresh/") for name in packed["recall-fresh.tar.xz"]]
    assert all(of_fresh) and len(of_fresh) == len(packed["recall.tar.xz"])
    assert not any(name.startswith("recall/fresh/") for name in packed["recall.tar.xz"])


def test_what_ran_on_fresh_seeds_so_far_is_shown(which, tmp_path):
    folders = [world(tmp_path, "recall"), world(tmp_path, "words")]
    # only one world has been run again when the budget is spent
    world(tmp_path / "other", "recall").rename(folders[0] / "fresh")
    which.keep(folders)
    league = which.read(which.KEPT)
    assert not league.tables["fresh"]
    assert any("Recall | good |" in part for part in which._fresh(league))


def test_a_world_without_packed_runs_gives_its_searches(which, tmp_path):
    folder = world(tmp_path, "recall")
    which.keep([folder])
    (which.RUNS / "recall.tar.xz").unlink()
    which.restore(tmp_path / "again")
    assert read(tmp_path / "again" / "recall") == read(folder)
    assert {path.name for path in (tmp_path / "again" / "recall").iterdir()} == {".headwise", FILE}


def test_what_cannot_be_kept_or_restored_changes_nothing(which, tmp_path):
    which.keep([world(tmp_path, "recall"), world(tmp_path, "words")])
    before = {path: path.read_bytes() for path in which.KEPT.rglob("*") if path.is_file()}
    unknown = world(tmp_path, "elsewhere")
    with pytest.raises(SystemExit, match="elsewhere is not a world of headwise-papers"):
        which.keep([unknown])
    other = world(tmp_path, "sentences")
    record = json.loads((other / FILE).read_text())
    (other / FILE).write_text(json.dumps(record | {"trials": 3}))
    with pytest.raises(StudyError, match="3, 6 trials"):
        which.keep([other])
    assert {path: path.read_bytes() for path in which.KEPT.rglob("*") if path.is_file()} == before
    (tmp_path / "again" / "words").mkdir(parents=True)
    with pytest.raises(SystemExit, match="words exists"):
        which.restore(tmp_path / "again")
    assert not (tmp_path / "again" / "recall").exists()


def test_the_table_of_the_first_edition_says_first_that_it_is_no_advice(which):
    lead, _, rest = which.PAGE.read_text(encoding="utf-8").partition("## ")
    assert "November 2026; nothing here is advice" in lead and "By what goes wrong" not in rest


def test_a_plain_model_that_fails_on_some_seeds_is_told(which, tmp_path):
    figures = {"plain": [1.0] * 5 + [0.999], "decay": [1.0] * 6, "good": [1.0] * 5 + [0.999]}
    folder = finished_world(tmp_path / "recall", "recall", figures, kinds=KINDS)
    finished_world(folder / "fresh", "recall", figures | {"plain": [1.0, 0.3, 1.0, 1.0, 0.2, 1.0]}, kinds=KINDS)
    which.keep([folder])
    league = which.read(which.KEPT)
    assert "reaches 87.49 % (20.00 to 100.00 over 12 seeds)" in which._of_plain(league, "recall")
