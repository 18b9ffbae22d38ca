"""Reading a study's folder: what belongs to it, what is damaged, what is unfinished."""

from __future__ import annotations

import json
import shutil

import pytest
from report.synthetic_study import write_study

from headwise_verdict.files import durable
from headwise_verdict.files.durable import append_lines, numbered_lines, read_lines
from headwise_verdict.results.folder import read_study

TWO = ("baseline", "Other()")


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"contains no study\.json.*--out"):
        read_study(tmp_path)


def test_a_damaged_result_is_named(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    path = next(folder.glob("runs/*/result.json"))
    path.write_text('{"status": "fini')
    with pytest.raises(ValueError, match=rf"{path.parent.name}/result\.json is not valid JSON.*Delete it"):
        read_study(folder)


def test_a_study_without_its_baseline_is_refused(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    study = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(study | {"baseline": "none"}))
    with pytest.raises(ValueError, match=r"the baseline 'none' is not among the arms \['baseline', 'Other\(\)'\]"):
        read_study(folder)


def test_two_results_of_one_cell_are_refused(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    shutil.copytree(folder / "runs" / "000100000000", folder / "runs" / "ffff00000000")
    with pytest.raises(ValueError, match=r"both hold a result of Other\(\) with seed 0"):
        read_study(folder)


def test_runs_that_the_study_does_not_name_are_left_out(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    shutil.copytree(folder / "runs" / "000100000000", folder / "runs" / "ffff00000000")
    study = json.loads((folder / "study.json").read_text())
    named = [{"hash": f"000{at}00000000", "arm": arm, "seed": 0} for at, arm in enumerate(TWO)]
    (folder / "study.json").write_text(json.dumps(study | {"runs": named}))
    assert read_study(folder).runs["Other()", 0].path.name == "000100000000"


def test_trials_of_tuning_are_left_out(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    shutil.copytree(folder / "runs" / "000100000000", folder / "runs" / "ffff00000000")
    config = folder / "runs" / "ffff00000000" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"purpose": "trial"}))
    assert len(read_study(folder).runs) == 2


def test_an_unfinished_run_is_missing(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    (folder / "runs" / "000100000000" / "result.json").unlink()
    study = read_study(folder)
    assert study.missing() == [("Other()", 0)]
    assert study.runs["Other()", 0].status == "unfinished"


@pytest.mark.parametrize("torn", ['{"epo', '{"epoch": 1', "\0\0\0", ""])
def test_a_torn_line_is_left_out_wherever_it_stands(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"epoch": 1}}\n{torn}')
    assert numbered_lines(path) == [(1, {"epoch": 1})]
    append_lines(path, [{"epoch": 2}, {"epoch": 3}])
    assert [record["epoch"] for record in read_lines(path)] == [1, 2, 3]


@pytest.mark.parametrize("wrong", ["epoch 1", "3", '["epoch"]', "}"])
def test_a_line_that_is_no_record_is_named(tmp_path, wrong):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"epoch": 1}}\n{wrong}\n{{"epoch": 2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is no record"):
        read_lines(path)


def test_lines_that_do_not_fit_on_the_disk_leave_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"epoch": 1}])
    before = path.read_bytes()

    def full(stream, content):
        stream.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        append_lines(path, [{"epoch": 2}, {"epoch": 3}])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], r"study\.json contains \[\] instead of a dictionary"),
        ({"arms": "baseline"}, r"study\.json has invalid values for arms"),
        ({"arms": [1, 2]}, "values for arms"),
        ({"baseline": 3, "seeds": ["0"]}, "values for baseline, seeds"),
        ({"metrics": "test_accuracy"}, "values for metrics"),
        ({"metrics": [{"name": "accuracy"}], "margin": "small"}, "values for metrics, margin"),
        ({"settings": [], "notes": "one", "runs": [1]}, "values for settings, runs, notes"),
    ],
)
def test_a_study_of_another_shape_is_named(tmp_path, change, message):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    study = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(study | change if change else change))
    with pytest.raises(ValueError, match=message):
        read_study(folder)


def test_a_study_of_an_earlier_version_is_refused_with_what_it_lacks(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=1, epochs=3)
    study = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(study | {"methods": study.pop("arms")}))
    with pytest.raises(ValueError, match="lacks arms; run `headwise compare` on this folder again"):
        read_study(folder)


@pytest.mark.parametrize("content", ["{}", "[]", '"done"', '{"status": "finished"}', '{"status": 1, "metrics": {}}'])
def test_what_is_no_result_is_named(tmp_path, content):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    (folder / "runs" / "000100000000" / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"000100000000/result\.json contains .*Delete it and run the study again"):
        read_study(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"method": 1}', r"config\.json does not name an arm and a seed"),
        ("metrics.jsonl", "[1]\n{}\n", r"metrics\.jsonl, line 1, is no record \(it is \[1\]\)"),
        ("metrics.jsonl", '{"loss": 1}\n', r"metrics\.jsonl, line 1, does not name an epoch"),
    ],
)
def test_files_of_a_run_of_another_shape_are_named(tmp_path, name, content, message):
    folder = write_study(tmp_path, methods=TWO, seeds=1)
    (folder / "runs" / "000100000000" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        len(read_study(folder).runs["Other()", 0].epochs)
