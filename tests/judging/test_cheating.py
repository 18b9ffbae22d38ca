"""Attempts to cheat judge: each is refused, told in a note, or harmless."""

import csv
import json
import random
import sys

import numpy as np
import pytest
from filelock import FileLock

from headwise.lab.comparing.judged_script import JudgedScript
from headwise_verdict.files.errors import StudyError
from headwise_verdict.judging.command import Request, run
from headwise_verdict.judging.decision import ACCEPT, GO_ON, Rule, judge
from headwise_verdict.judging.pairs import judge_pairs

METRIC = "loss:lower"
DRAWS = random.Random(3)
BASE = [3.2 + DRAWS.gauss(0, 0.01) for _ in range(12)]
# a change that does nothing
NEW = [value + DRAWS.gauss(0, 0.01) for value in BASE]


def written(path, new=NEW, base=BASE):
    """Write a table of both arms; `new` and `base` are lists, or dictionaries by seed."""
    new, base = (one if isinstance(one, dict) else dict(enumerate(one)) for one in (new, base))
    rows = [("base", seed, base[seed]) for seed in base] + [("new", seed, new[seed]) for seed in new]
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerows([("arm", "seed", "loss"), *rows])
    return path


def ask(table, capsys, **options):
    """Return the exit code and the lines that are printed."""
    code = run(Request(table, METRIC, "new", "base", **options))
    return code, capsys.readouterr().out.splitlines()


# peeking, and choosing among the looks


def test_peeking_until_the_answer_pleases_errs_no_more_often_than_stated():
    rng = np.random.default_rng(5)
    accepted = sum(judge(iter(rng.normal(size=40))).answer == ACCEPT for _ in range(400))
    # 5 % and three standard errors
    assert accepted / 400 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


# dropping runs


def test_seeds_left_out_of_both_arms_are_told(tmp_path, capsys):
    kept = {seed: value for seed, value in enumerate(NEW) if seed not in (2, 5)}
    base = {seed: BASE[seed] for seed in kept}
    _, printed = ask(written(tmp_path / "runs.csv", kept, base), capsys)
    assert any("new has no run with seed 2, 5: all seeds that were run" in text for text in printed)
    sparse = dict(zip((1, 42, 1234, 777, 9001), NEW))
    _, printed = ask(written(tmp_path / "runs.csv", sparse, dict(zip(sparse, BASE))), capsys)
    assert not any("no run with seed" in text for text in printed)


def test_runs_replaced_after_a_look_are_told_by_the_ledger(tmp_path, capsys):
    ledger = tmp_path / "ledger.jsonl"
    table = written(tmp_path / "runs.csv", NEW[:5], BASE[:5])
    assert ask(table, capsys, ledger=ledger)[0] == 3
    honest = ask(written(table, NEW[:8], BASE[:8]), capsys, ledger=ledger)[1]
    assert not any("earlier look" in text for text in honest)
    for lucky, base in (
        ([*NEW[:4], NEW[4] - 0.05, *NEW[5:8]], BASE[:8]),
        (dict(list(enumerate(NEW[:8]))[::-1]), BASE[:8]),
        (NEW[:3], BASE[:3]),
    ):
        printed = ask(written(table, lucky, base), capsys, ledger=ledger)[1]
        assert any("an earlier look had 5 pairs" in text and "alpha no longer holds" in text for text in printed)


def test_runs_replaced_after_a_later_look_with_the_same_answer_are_told(tmp_path, capsys):
    ledger = tmp_path / "ledger.jsonl"
    table = written(tmp_path / "runs.csv", NEW[:4], BASE[:4])
    for count in (4, 6, 6):
        assert ask(written(table, NEW[:count], BASE[:count]), capsys, ledger=ledger)[0] == 3
    # each look is kept once
    assert [json.loads(line)["pairs"] for line in ledger.read_text().splitlines()] == [4, 6]
    printed = ask(written(table, [*NEW[:5], NEW[5] - 0.01], BASE[:6]), capsys, ledger=ledger)[1]
    assert any("an earlier look had 6 pairs" in text and "alpha no longer holds" in text for text in printed)
    # runs that are restored leave no doubt
    assert not any("earlier" in text for text in ask(written(table, NEW[:7], BASE[:7]), capsys, ledger=ledger)[1])


def test_runs_of_the_floor_as_a_candidate_are_told(tmp_path, capsys):
    table, floor = written(tmp_path / "runs.csv"), tmp_path / "floor.json"
    assert run(Request(table, METRIC, "candidate", "base", calibrate=True, floor=floor)) == 0
    assert run(Request(table, METRIC, "base", floor=floor)) == 3
    assert "12 of the candidate's figures are among the floor's: are these its runs?" in capsys.readouterr().out
    run(Request(table, METRIC, "new", floor=floor))
    assert "go on: new against base: " in (told := capsys.readouterr().out) and "are these" not in told
    with pytest.raises(StudyError, match=r"is the floor of base, not of other\. Leave --baseline out"):
        run(Request(table, METRIC, "new", "other", floor=floor))


def test_a_margin_changed_after_a_look_is_told_by_the_ledger(tmp_path, capsys):
    table, ledger = written(tmp_path / "runs.csv"), tmp_path / "ledger.jsonl"
    ask(table, capsys, ledger=ledger, margin=0.001)
    assert any("the margin was 0.001 at an earlier" in text for text in ask(table, capsys, ledger=ledger)[1])
    assert not any("margin was" in text for text in ask(table, capsys, ledger=tmp_path / "other.jsonl")[1])


def test_a_bound_or_an_alpha_changed_after_a_look_is_told_by_the_ledger(tmp_path, capsys):
    table, ledger = written(tmp_path / "runs.csv"), tmp_path / "ledger.jsonl"
    assert "was" not in "".join(ask(table, capsys, ledger=ledger, bound=1.0)[1])
    printed = ask(table, capsys, ledger=ledger, bound=0.5)[1]
    assert any("the bound was 1 at an earlier look, and is 0.5 now: alpha no longer holds" in text for text in printed)
    assert any(
        "the bound was 1 at an earlier look, and is none now" in text for text in ask(table, capsys, ledger=ledger)[1]
    )
    run(Request(table, METRIC, "base", "new", ledger=ledger, alpha=0.3))
    assert (
        "alpha was 0.05 for earlier entries: the ledger holds the false discoveries below the largest alpha only"
        in capsys.readouterr().out
    )


def test_a_bound_that_pairs_exceed_is_refused(tmp_path, capsys):
    with pytest.raises(StudyError, match=r"pair \d+ differs by .*, more than the bound 1e-06, which is too small"):
        ask(written(tmp_path / "runs.csv"), capsys, bound=1e-6)
    with pytest.raises(StudyError, match="--bound needs pairs of runs, and --floor has none"):
        ask(written(tmp_path / "runs.csv"), capsys, bound=1.0, floor=tmp_path / "floor.json")
    with pytest.raises(StudyError, match=r"--bound must be a number above the margin, 0\.5"):
        ask(written(tmp_path / "runs.csv"), capsys, bound=0.1, margin=0.5)


# duplicating runs


def test_pairs_that_repeat_one_pair_are_told(tmp_path, capsys):
    base = [3.2 + seed / 7 for seed in range(6)]
    code, printed = ask(written(tmp_path / "runs.csv", [value - 0.02 for value in base], base), capsys)
    assert code == 0 and any("all 6 differences are -0.02" in text for text in printed)
    assert judge([-0.02, -0.021, -0.02, -0.02]).notes == () and judge([0.02, 0.02]).notes == ()
    assert "all 4 differences are 0:" in judge([0.0] * 4, Rule(margin=0.1)).notes[0]


def test_a_run_copied_under_another_seed_is_told(tmp_path, capsys):
    printed = ask(written(tmp_path / "runs.csv", [*NEW[:5], NEW[2]], [*BASE[:5], BASE[2]]), capsys)[1]
    assert sum("are these copies of a run?" in text for text in printed) == 2


# diverged runs


def test_diverged_runs_count_as_the_figure_that_was_declared(tmp_path, capsys):
    new = ["nan" if seed in (1, 4) else value for seed, value in enumerate(NEW)]
    table = written(tmp_path / "runs.csv", new)
    with pytest.raises(StudyError, match="pass --diverged with the metric of a model that has learned nothing"):
        ask(table, capsys)
    code, printed = ask(table, capsys, diverged=6.9)
    assert code == 3 and "diverged, and counted as 6.9: new with seed 1, 4" in printed[-1]
    assert not any("copies" in text for text in printed)
    with pytest.raises(StudyError, match=r"--diverged 3 is better than 3\.2\d+, .*diverging would pay"):
        ask(table, capsys, diverged=3.0)
    with pytest.raises(StudyError, match="--target judges steps"):
        ask(table, capsys, diverged=6.9, target=3.0)


# the ledger


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [lines[0].replace('"go on"', '"accept"'), *lines[1:]], 1),
        (lambda lines: [lines[0].replace('"alpha": 0.0', '"alpha": 0.1'), *lines[1:]], 1),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], *lines[2:]], 2),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
    ],
)
def test_an_edited_ledger_is_refused(tmp_path, capsys, change, line):
    table, ledger = written(tmp_path / "runs.csv"), tmp_path / "ledger.jsonl"
    for metric in ("loss:lower", "loss:higher"):
        run(Request(table, metric, "new", "base", ledger=ledger))
    run(Request(table, METRIC, "base", "new", ledger=ledger))
    lines = ledger.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    ledger.write_text("".join(change(lines)))
    assert ledger.read_text() != "".join(lines)
    with pytest.raises(StudyError, match=rf"line {line}, was edited, or lines before it were deleted or moved"):
        ask(table, capsys, ledger=ledger)


def test_a_ledger_started_again_shows_its_length(tmp_path, capsys):
    table, ledger = written(tmp_path / "runs.csv"), tmp_path / "ledger.jsonl"
    printed = ask(table, capsys, ledger=ledger)[1]
    assert "0 of 1 candidates accepted" in printed[-1]


TRAINING = """
import argparse, random
import headwise

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=1.0)
asked, run = parser.parse_args(), headwise.run()
run.log(step=1, loss=float("nan") if asked.rate > 5 and run.seed % 2 else 3.0)
run.record(loss=3.2 + random.Random(run.seed).gauss(0, 0.1) + random.Random(f"{run.seed} {asked.rate}").gauss(0, 0.01))
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    return f"{sys.executable} train.py"


def test_a_ledger_is_free_while_a_script_trains_and_its_level_is_reserved(command, tmp_path, capsys, monkeypatch):
    from headwise_verdict.judging import command as commands

    path, seen = tmp_path / "ledger.jsonl", []

    def spied(*arguments):
        with FileLock(tmp_path / ".ledger.jsonl.lock", timeout=0):
            seen.append(json.loads(path.read_text().splitlines()[0]))
        return judged(*arguments)

    judged = commands.judge_pairs
    monkeypatch.setattr(commands, "judge_pairs", spied)
    script = JudgedScript(command, "rate=2", METRIC)
    options = {"budget": 2, "paired": script, "ledger": path}
    assert run(Request(None, METRIC, "rate=2", **options)) == 4
    assert seen[0]["answer"] == GO_ON and seen[0]["pairs"] == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["pairs"] for line in lines] == [0, 2] and lines[0]["alpha"] == lines[1]["alpha"]
    # the same change of another script is another candidate
    assert {line["script"] for line in lines} == {command}
    (tmp_path / "other.py").write_text(TRAINING)
    other = JudgedScript(f"{sys.executable} other.py", "rate=2", METRIC)
    assert run(Request(None, METRIC, "rate=2", **options | {"paired": other})) == 4
    added = [json.loads(line) for line in path.read_text().splitlines()[2:]]
    assert {line["script"] for line in added} == {other.command} and added[0]["alpha"] < lines[0]["alpha"]
    lines += added
    # a call that is refused takes no level
    with pytest.raises(StudyError, match="--script needs --budget"):
        run(Request(None, METRIC, "rate=3", paired=script, ledger=path))
    assert len(path.read_text().splitlines()) == len(lines)


def test_a_diverged_run_of_a_script_counts_as_declared(command, capsys):
    with pytest.raises(StudyError, match="Pass --diverged with the metric of a model that has learned nothing"):
        judge_pairs(JudgedScript(command, "rate=9", METRIC), Rule(budget=2))
    decision = judge_pairs(JudgedScript(command, "rate=9", METRIC, diverged=7.5), Rule(budget=4))
    assert decision.pairs == 4 and decision.mean > 1
    assert "diverged, and counted as 7.5: candidate with seed 1, candidate with seed 3" in decision.notes
    with pytest.raises(StudyError, match="diverging would pay"):
        judge_pairs(JudgedScript(command, "rate=9", METRIC, diverged=0.0), Rule(budget=4))
