"""A finished run whose files were damaged is repeated by `compare` and named by `report`, never shown as whole."""

import json
import subprocess
import sys

import pytest
from small_studies import Silent, all_numbers, carry, tiny_study

from headwise.reporting import write
from headwise.results.folder import read_study

ARM = "DropHead(p=0.3)"


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def cut_at_a_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def empty(path):
    path.write_text("")


def double(path):
    path.write_text(2 * path.read_text())


def delete(path):
    path.unlink()


def damaged(study, out, name, harm):
    """Carry out a study, watched, then harm a file of its first run; give that run's folder."""
    carry(study, out, watch=True)
    runs = json.loads((out / "study.json").read_text())["runs"]
    folder = out / "runs" / runs[1]["hash"]
    harm(folder / name)
    return folder


def health(folder):
    records = map(json.loads, (folder / "health.jsonl").read_text().splitlines())
    return [record for record in records if "alert" not in record]


@pytest.mark.parametrize("harm", [cut, cut_at_a_line, empty, double, delete])
@pytest.mark.parametrize("name", ["metrics.jsonl", "health.jsonl"])
def test_compare_repeats_a_finished_run_whose_files_were_damaged_to_the_same_numbers(tmp_path, name, harm):
    study = tiny_study(methods=(ARM,), epochs=2)
    carry(study, tmp_path / "whole", watch=True)
    folder, listener = damaged(study, tmp_path / "harmed", name, harm), Silent()
    carry(study, tmp_path / "harmed", listener=listener, watch=True)
    what = "is gone" if harm is delete else "is not what the run wrote"
    assert [text for text in listener.said if f"{folder}: {name} {what}; the run is repeated" in text], listener.said
    assert [order.configuration.arm for order in listener.ends] == [ARM]
    assert all_numbers(tmp_path / "harmed") == all_numbers(tmp_path / "whole")
    assert health(folder) == health(tmp_path / "whole" / "runs" / folder.name)


@pytest.mark.parametrize("harm", [cut, cut_at_a_line, empty, double, delete])
@pytest.mark.parametrize("name", ["metrics.jsonl", "health.jsonl"])
def test_a_report_leaves_a_damaged_run_out_by_name(tmp_path, name, harm):
    folder = damaged(tiny_study(methods=(ARM,), epochs=2), tmp_path, name, harm)
    study = read_study(tmp_path)
    assert [(run.path.name, run.status, run.epochs, run.health()) for run in study.damaged()] == [
        (folder.name, "damaged", [], [])
    ]
    assert study.missing() == [(ARM, 0)]
    page = write(tmp_path).read_text()
    assert f"{ARM}, seed 0, is damaged and left out: in runs/{folder.name}, {name}" in page
    (entry,) = json.loads((tmp_path / "analysis.json").read_text())["damaged"]
    assert entry["run"] == folder.name and entry["files"][0].startswith(name)


def test_the_command_names_the_damaged_run(tmp_path):
    folder = damaged(tiny_study(methods=(ARM,), epochs=1), tmp_path, "metrics.jsonl", empty)
    command = [sys.executable, "-m", "headwise.cli", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert f"note: {ARM}, seed 0, is damaged and left out: in runs/{folder.name}, metrics.jsonl" in done.stderr


def test_a_repeat_that_is_stopped_is_still_a_repeat(tmp_path, monkeypatch):
    import headwise.training.damage as clearing

    study = tiny_study(methods=(ARM,), epochs=2)
    folder = damaged(study, tmp_path, "health.jsonl", cut_at_a_line)

    def stop(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(clearing, "drop_all", stop)
    with pytest.raises(KeyboardInterrupt):
        carry(study, tmp_path, watch=True)
    monkeypatch.undo()
    listener = Silent()
    carry(study, tmp_path, listener=listener, watch=True)
    assert any("health.jsonl is not what the run wrote" in text for text in listener.said)
    assert len(health(folder)) == len({json.dumps(record, sort_keys=True) for record in health(folder)}) > 0


def test_a_run_that_was_not_watched_holds_no_readings_of_another(tmp_path):
    study = tiny_study(epochs=1)
    (result,) = carry(study, tmp_path)
    (tmp_path / "runs" / result["hash"] / "health.jsonl").write_text('{"step": 0}\n')
    assert read_study(tmp_path).damaged()[0].damage == ("health.jsonl came after the run had finished",)


def test_a_result_of_a_version_without_digests_is_read(tmp_path):
    study = tiny_study(epochs=1)
    (result,) = carry(study, tmp_path)
    path = tmp_path / "runs" / result["hash"] / "result.json"
    path.write_text(json.dumps({key: value for key, value in result.items() if key != "digests"}))
    (path.parent / "metrics.jsonl").write_text("")
    assert read_study(tmp_path).damaged() == [] and read_study(tmp_path).missing() == []


def test_a_report_clears_what_a_killed_one_left_and_leaves_what_another_writes(tmp_path):
    import os

    carry(tiny_study(epochs=1), tmp_path)
    left, writing = tmp_path / f".report.html.{2**22 + 1}", tmp_path / f".report.html.{os.getppid()}"
    left.write_text("<html>")
    writing.write_text("<html>")
    write(tmp_path)
    assert not left.exists() and writing.exists()
