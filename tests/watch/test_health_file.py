"""The file that `JsonLines` writes, read back."""

import math
from pathlib import Path

import pytest
from watched_model import figure, read, sharpen, watched

from headwise.health.watching.alerts import Judge
from headwise.health.watching.logs import JsonLines
from headwise.health.watching.rules import Thresholds
from headwise_verdict.results.health_records import read_health


def test_what_is_written_is_read_back_as_it_was(tmp_path):
    path = tmp_path / "health.jsonl"
    model, watch = watched(log=JsonLines(path), rows=4)
    read(model, watch)
    sharpen(model, 40.0)
    read(model, watch)
    found = read_health(path)
    assert [line for line in found if "alert" not in line] == watch.records()
    assert [line for line in found if "alert" in line] == watch.alerts()
    assert watch.alerts()


def test_the_path_of_a_file_is_a_log_of_json_lines(tmp_path):
    for path in (tmp_path / "a.jsonl", str(tmp_path / "b.jsonl")):
        model, watch = watched(log=path)
        read(model, watch)
        assert read_health(Path(path)) == watch.records() != []
        watch.remove()


def test_numbers_that_json_cannot_hold_come_back(tmp_path):
    path = tmp_path / "health.jsonl"
    record = figure("max_logit", math.nan)
    (alert,) = Judge(Thresholds()).alerts([record])
    JsonLines(path).write([record, alert], 0)
    found, raised = read_health(path)
    assert math.isnan(found["value"])
    assert raised["threshold"] == math.inf


def test_a_torn_line_is_left_out_and_a_wrong_one_named(tmp_path):
    path = tmp_path / "health.jsonl"
    assert read_health(path) == []
    JsonLines(path).write([figure("max_logit", 1.0)], 0)
    whole = path.read_text()
    path.write_text('{"torn\n' + whole)
    assert read_health(path) == [figure("max_logit", 1.0)]
    path.write_text(whole + whole.replace("1.0", '"high"'))
    with pytest.raises(ValueError, match=r"health.jsonl, line 2, is not a health record: value"):
        read_health(path)
    path.write_text("3\n")
    with pytest.raises(ValueError, match=r"line 1, is no record \(it is 3\)"):
        read_health(path)
