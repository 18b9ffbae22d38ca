"""The health of heads in a report: what is drawn, what is thinned, what is told of alerts."""

from __future__ import annotations

import json

import pytest
from report.synthetic_study import write_study

import headwise_verdict.reporting
from headwise_verdict.reporting.health_section import health_sections, thin
from headwise_verdict.results.folder import read_study

ONE = ("baseline",)


def watched(folder, records):
    write_study(folder, methods=ONE, seeds=1)
    run = next(folder.glob("runs/*"))
    (run / "health.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_study(folder)


def reading(step, head=0, depth=0, site="blocks.0.attn", value=1.0, statistic="attention_entropy"):
    return {"site": site, "depth": depth, "head": head, "step": step, "statistic": statistic, "value": value}


def body(study) -> str:
    return str(health_sections(study)[0].body)


def test_a_study_without_watching_has_no_section(tmp_path):
    assert health_sections(read_study(write_study(tmp_path, methods=ONE, seeds=1))) == []


def test_readings_are_thinned_evenly_and_keep_both_ends():
    assert thin(list(range(0, 1000, 10)), 5) == [0, 250, 500, 740, 990]
    assert thin([1, 2, 3], 5) == [1, 2, 3]


def test_a_step_read_again_after_a_kill_counts_once_and_torn_lines_not_at_all(tmp_path):
    study = watched(tmp_path, [reading(0, value=1.0), reading(50, value=2.0), reading(50, value=3.0)])
    path = study.runs["baseline", 0].path / "health.jsonl"
    path.write_text('{"torn\n' + path.read_text())
    assert [record["value"] for record in study.runs["baseline", 0].health()] == [1.0, 3.0]


def test_layers_that_share_a_depth_are_told_apart_by_their_sites(tmp_path):
    records = [reading(step, site=site) for step in (0, 50) for site in ("encoder.0.attn", "decoder.0.attn")]
    assert "decoder.0.attn · 0" in body(watched(tmp_path, records))


def test_groups_of_heads_are_told_apart(tmp_path):
    records = [
        reading(step, head=None, statistic="imbalance_vo", value=group + 1.5) | {"group": group}
        for step in (0, 50)
        for group in (0, 1)
    ]
    study = watched(tmp_path, records)
    assert len(study.runs["baseline", 0].health()) == 4
    text = body(study)
    assert '{"layer":0,"head":"group 0","values":[1.5,1.5]}' in text
    assert '{"layer":0,"head":"group 1","values":[2.5,2.5]}' in text


def test_of_many_statistics_those_that_alerts_judge_are_drawn(tmp_path):
    from headwise.health.statistics import STATISTICS

    records = [reading(step, statistic=name) for step in (0, 50) for name in STATISTICS]
    text = body(watched(tmp_path, records))
    assert "entropy share (share of log(keys))" in text
    assert "attention distance (tokens)" not in text
    few = [record for record in records if record["statistic"] in ("attention_distance", "max_logit")]
    assert "attention distance (tokens)" in body(watched(tmp_path / "few", few))


def test_the_health_of_nine_runs_with_thirty_heads_takes_less_than_two_megabytes(tmp_path):
    import random

    numbers = random.Random(0)
    names = ("attention_entropy", "entropy_share", "max_logit", "sink_mass", "output_norm", "head_redundancy")
    records = [
        reading(50 * step, head, depth, f"blocks.{depth}.attn", numbers.uniform(0, 9), name)
        for step in range(20)
        for depth in range(10)
        for head in range(3)
        for name in (*names, "effective_rank_qk", "effective_rank_vo")
    ]
    assert 9 * len(body(watched(tmp_path, records))) < 2e6


def test_an_alert_is_shown_with_its_remedy_and_source(tmp_path):
    alert = reading(50) | {
        "alert": "entropy collapse",
        "threshold": 0.05,
        "sentence": "it fell",
        "remedy": "bound it",
        "measured": "",
        "source": "a paper",
    }
    text = body(watched(tmp_path, [reading(0), reading(50), alert]))
    assert "1 alert in 1 watched run" in text
    assert "it fell; bound it" in text
    assert "a paper" in text


def test_many_alerts_are_cut_and_the_cut_is_told(tmp_path):
    said = {"alert": "sink", "threshold": 0.5, "remedy": "wait", "source": "a paper", "measured": ""}
    alerts = [reading(step) | said | {"sentence": f"at {step}"} for step in range(150)]
    text = body(watched(tmp_path, alerts))
    assert "150 alerts in 1 watched run; the first 100 are listed" in text
    assert "at 99; wait" in text
    assert "at 100; wait" not in text


def test_readings_that_are_not_finite_leave_a_gap(tmp_path):
    study = watched(tmp_path, [reading(0), reading(0, head=1, value=None), reading(50), reading(50, head=1)])
    html = headwise_verdict.reporting.write(study.path).read_text(encoding="utf-8")
    assert '"value":null' not in html
    assert "attention entropy (nats)" in html


def test_a_line_that_is_no_record_is_named(tmp_path):
    study = watched(tmp_path, [reading(0), {"site": "blocks.0.attn", "step": 1}])
    with pytest.raises(ValueError, match=r"health.jsonl, line 2, is not a health record: depth"):
        health_sections(study)
