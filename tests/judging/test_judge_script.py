"""Judging a change of a script: pairs are run until they decide, in random order, kept, and judged like a table."""

import json
import sys

import pytest

from headwise.lab.comparing.judged_script import JudgedScript, pairs_of
from headwise_verdict.files.errors import StudyError
from headwise_verdict.judging.command import Request, run
from headwise_verdict.judging.decision import ACCEPT, Rule
from headwise_verdict.judging.pairs import judge_pairs

TRAINING = """
import argparse, random, sys
from pathlib import Path
import headwise

parser = argparse.ArgumentParser()
parser.add_argument("--gain", type=float, default=0.0)
parser.add_argument("--wrong", default="")
asked, run = parser.parse_args(), headwise.run()
with open("started.txt", "a") as stream:
    stream.write(f"{run.seed} {asked.gain}\\n")
draws = random.Random(0 if asked.wrong == "seed" else run.seed)
start = draws.gauss(3.2, 0.1)
noise = random.Random(f"{draws.random()} {asked.gain}").gauss(0, 0.01)
run.saw([start, asked.gain if asked.wrong == "data" else 0])
run.log(step=1, loss=float("nan") if asked.wrong == "diverges" else start)
if asked.wrong == "exits":
    sys.exit("the disk is full")
run.record(val_loss=start - asked.gain + noise)
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    return f"{sys.executable} train.py"


def started(tmp_path):
    return [tuple(map(float, line.split())) for line in (tmp_path / "started.txt").read_text().splitlines()]


def test_pairs_are_run_until_they_decide_and_are_kept(command, tmp_path, capsys):
    def request(**form):
        script = JudgedScript(command, "gain=0.08", "val_loss:lower")
        return Request(None, "val_loss:lower", "gain=0.08", budget=10, paired=script, **form)

    assert run(request()) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("accept: gain=0.08 against baseline: −0.0") and "seed 3: gain=0.08" in printed.err
    runs = started(tmp_path)
    pairs = len(runs) // 2
    assert 4 <= pairs < 10 and [runs[i][0] for i in range(0, len(runs), 2)] == list(range(pairs))
    # the first of a pair is drawn
    assert {runs[i][1] for i in range(0, len(runs), 2)} == {0.0, 0.08}
    # again: the same answer from kept runs, none is started
    assert run(request(as_json=True)) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["pairs"] == pairs and len(started(tmp_path)) == len(runs)
    # the table that is left gives the same answer
    table = tmp_path / "results" / "judge" / "train" / "judged.csv"
    assert len(table.read_text().splitlines()) == 1 + 2 * pairs
    assert run(Request(table, "val_loss:lower", "gain=0.08", as_json=True)) == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"budget": 10} == record


def test_what_was_accepted_is_run_again_on_fresh_seeds(command, capsys):
    script = JudgedScript(command, "gain=0.08", "val_loss:lower", first=100)
    assert judge_pairs(script, Rule(budget=2)).pairs == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()[-2:]] == ["seed 100", "seed 101"]


def test_a_change_that_does_nothing_spends_its_budget(command, capsys):
    script = JudgedScript(command, "gain=1e-9", "val_loss:lower")
    assert run(Request(None, "val_loss:lower", "gain=1e-9", budget=3, paired=script)) == 4
    assert "the budget of 3 is spent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("seed", "seeds 0 and 1 give the same figures in both arms: the script ignores its seed"),
        ("diverges", "seed 0, diverged and has no test/val_loss"),
        ("exits", r"seed 0: .*\n.*the disk is full"),
    ],
)
def test_runs_that_are_no_pairs_are_refused(command, wrong, message):
    script = JudgedScript(f"{command} --wrong {wrong}", "gain=0.08", "val_loss:lower")
    with pytest.raises(StudyError, match=message):
        judge_pairs(script, Rule(budget=4))


def test_arms_that_see_other_data_are_told(command):
    decision = judge_pairs(JudgedScript(f"{command} --wrong data", "gain=0.5", "val_loss:lower"), Rule(budget=6))
    assert decision.answer == ACCEPT and "initial weights or batches differ" in decision.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [("", "--script needs --change"), ("DropHed(p=0.1)", "no method 'DropHed'"), ("baseline", "changes nothing")],
)
def test_a_change_that_is_none_is_refused(command, change, message):
    with pytest.raises(StudyError, match=message):
        next(pairs_of(JudgedScript(command, change, "val_loss:lower")))


def test_options_that_contradict_each_other_are_refused(command, tmp_path):
    script = JudgedScript(command, "gain=0.1", "val_loss:lower")
    with pytest.raises(StudyError, match="--script needs --budget"):
        run(Request(None, "val_loss:lower", "gain=0.1", paired=script))
    with pytest.raises(StudyError, match="--floor belongs to a table"):
        run(Request(None, "val_loss:lower", "gain=0.1", budget=4, paired=script, floor=tmp_path / "floor.json"))
    for table, given in ((None, None), (tmp_path / "runs.csv", script)):
        with pytest.raises(StudyError, match="Give either a table with one row per run, or --script"):
            run(Request(table, "val_loss:lower", "new", paired=given))
