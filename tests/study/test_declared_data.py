"""What a study reads is told with its size before it is fetched."""

import re
from pathlib import Path

import pytest

from headwise.lab.comparing.command import announce, carry_out
from headwise.lab.comparing.request import Request
from headwise.lab.engines.local import HereEngine
from headwise.lab.studies.listing import print_studies
from headwise.lab.studies.registry import Installed, catalogue, load_study
from headwise.study import DataSet

DOCS = Path(__file__).parents[2] / "docs"


def test_a_data_set_is_here_when_all_files_of_a_form_are(tmp_path):
    plays = DataSet("plays", (("one.txt", "two.txt"), ("plays-py/all",)), megabytes=2.5)
    assert plays.words(tmp_path) == "plays, 2.5 MB unpacked, to download"
    (tmp_path / "plays").mkdir()
    (tmp_path / "plays" / "one.txt").touch()
    assert not plays.is_here(tmp_path)
    (tmp_path / "plays" / "two.txt").touch()
    assert plays.is_here(tmp_path) and plays.is_here(tmp_path / "plays")
    (tmp_path / "plays" / "two.txt").unlink()
    (tmp_path / "plays-py").mkdir()
    (tmp_path / "plays-py" / "all").touch()
    assert plays.words(tmp_path) == "plays, 2.5 MB unpacked, here"
    assert DataSet("speech", (("a.npz",),), downloads=False).words(tmp_path) == (
        "speech, size not known, to be obtained manually"
    )


def test_a_study_says_what_it_downloads_before_it_does(tmp_path):
    pytest.importorskip("headwise_papers")
    study = load_study("blog-cifar10").STUDY
    study = study.model_copy(update={"task": study.task.located(tmp_path)})
    assert announce(study, tmp_path, 0)[-1] == "data:   cifar-10-batches-bin, 184 MB unpacked, to download"
    assert not any(line.startswith("data:") for line in announce(load_study("digits").STUDY, tmp_path, 0))


def test_a_plan_downloads_nothing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("headwise_papers")
    monkeypatch.chdir(tmp_path)
    request = Request(study="blog-cifar10", studies=Installed(), plan=True, seeds=2, trials=3, data=tmp_path / "none")
    carry_out(request, HereEngine())
    said = " ".join(capsys.readouterr().out.split())
    assert "data: cifar-10-batches-bin, 184 MB unpacked, to download plan: 18 runs after 27 trials; layers" in said
    assert "once cifar-10-batches-bin is here. Nothing was downloaded" in said and not list(tmp_path.iterdir())


def test_sizes_are_those_of_the_page_on_data():
    page = (DOCS / "data.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    found = {
        entry["name"]: entry["megabytes"]
        for study in catalogue()["studies"].values()
        for entry in study.get("data", [])
    }
    assert len(found) > 9
    for name, megabytes in found.items():
        row = next(row for row in rows if f"`{name}/" in row)
        assert megabytes is None or re.search(rf"\| {megabytes:g} MB( each)? \|", row), name


def test_minutes_are_of_kept_runs_and_others_are_not_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWISE_DATA", str(tmp_path))
    print_studies("digits")
    said = capsys.readouterr().out
    assert "compare digits: 9 x 10, 90 runs took 6.9 min" in said and max(map(len, said.splitlines())) <= 80
    for name, entry in catalogue()["studies"].items():
        page = DOCS / "results" / name / "README.md"
        assert bool(entry["measured"]) <= page.exists(), name
        for figures in entry["measured"].values():
            assert f"{figures['minutes']:.1f} minutes" in page.read_text()
