"""Steps to a target: where curves reach it, what the command answers, and which curves are refused."""

import csv
import json

import pytest

from headwise_verdict.files.errors import StudyError
from headwise_verdict.judging.command import Request, run
from headwise_verdict.judging.curves import Target


def curves(path, shift=0, last=400, rows=()):
    """Five pairs whose loss falls from 4 by 0.01 a step, that of the candidate `shift` steps earlier."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("arm", "seed", "step", "val_loss"))
        for seed in range(5):
            for arm, ahead in (("main", 0), ("new", shift + seed)):
                # a run without its last points, whose rows are in no order
                for step in reversed(range(0, last + 1, 50)):
                    writer.writerow((arm, seed, step, 4 - 0.01 * (step + ahead)))
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("target", "curve", "step"),
    [
        (Target(3.25, False), [(0, 4.0), (50, 3.5), (100, 3.0), (150, 3.4)], 75.0),
        (Target(3.0, False), [(0, 4.0), (50, 3.0)], 50.0),
        (Target(0.5, True), [(10, 0.6), (20, 0.7)], 10),
        (Target(0.5, True), [(10, 0.2), (20, 0.6)], 17.5),
        (Target(0.9, True), [(10, 0.2), (20, 0.6)], None),
        (Target(0.9, True), [], None),
    ],
)
def test_a_curve_reaches_its_target_between_two_points(target, curve, step):
    assert target.reached(curve) == (None if step is None else pytest.approx(step))


def test_fewer_steps_are_accepted_whatever_the_metric(tmp_path, capsys):
    table = curves(tmp_path / "curves.csv", shift=40)
    assert run(Request(table, "val_loss:lower", "new", "main", target=1.13, as_json=True)) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["metric"] == "steps to val_loss 1.13" and record["better"] == "lower" and record["pairs"] == 5
    assert record["difference"] == pytest.approx(-42)
    assert run(Request(table, "val_loss:lower", "main", "new", target=1.13)) == 1
    assert "in steps to val_loss 1.13" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"target": -0.4}, (), r"main with seed 0, main .*val_loss -0.4 is never reached.*favour their arm"),
        ({"target": 1.0, "step": "epoch"}, (), "has no column 'epoch'"),
        ({"target": 1.0}, [("new", 0, 50, 3.0)], "new with seed 0 has a step twice"),
        ({"target": 1.0}, [("new", 0, "soon", 3.0)], "step is 'soon', which is not a number"),
    ],
)
def test_curves_without_an_answer_are_refused(tmp_path, options, rows, message):
    table = curves(tmp_path / "curves.csv", shift=45, rows=rows)
    with pytest.raises(StudyError, match=message):
        run(Request(table, "val_loss:lower", "new", "main", **options))


def test_a_run_without_the_target_in_another_arm_is_no_obstacle(tmp_path, capsys):
    table = curves(tmp_path / "curves.csv", shift=40, rows=[("other", 0, 1, 9.0)])
    assert run(Request(table, "val_loss:lower", "new", "main", target=1.13)) == 0
