"""A contest searches all alike, compares with the best plain model there is, and stops where nothing can be learned."""

import re

import pytest
import torch
from contests import CONTESTANTS, TASK, filled, small_world
from headwise_papers.league.brief_run import Figures, run_once
from headwise_papers.league.code_digest import used
from headwise_papers.league.contest import Contest, Progress, carry_out
from headwise_papers.league.contest_files import (
    Contestant,
    rate_at,
    rates,
    read_contestants,
    read_small_worlds,
    why_refused,
)
from headwise_papers.league.contest_page import page
from headwise_papers.league.contest_tables import FURTHER, TUNED, advised, rows, suffices, tables
from headwise_papers.league.rate_search import AGAIN, FINAL, TUNING, Chosen, Errors, search
from headwise_papers.league.run_ledger import FILE, Ledger, Run
from headwise_papers.league.world_premises import SEEDS

from headwise_verdict.files.errors import StudyError


def accuracy(run, split, best=0.00178):
    """Return an accuracy that falls with the distance of the rate from the best one, and gains from a decay of 0.3."""
    away = abs(torch.log10(torch.tensor(run.rate / best)).item())
    gain = 0.05 if "0.3" in run.arm else 0.1 if run.eased else 0.0
    return 0.6 - 0.1 * away + gain + 0.001 * (run.seed % 7)


def test_the_grid_has_nine_rates_over_two_decades_and_the_usual_one_in_its_middle(tmp_path):
    world = small_world(tmp_path)
    grid = rates(world)
    assert len(grid) == 9 and grid[4] == world.usual_rate and grid[-1] / grid[0] == pytest.approx(100)
    wide = rates(world, wide=True)
    assert set(grid) < set(wide) and wide[-1] == pytest.approx(10 * grid[-1])
    assert len(rates(world, halved=True)) == 17 and set(grid) < set(rates(world, halved=True))


def test_every_contestant_is_searched_at_the_same_rates_and_seeds(tmp_path):
    contest = filled(tmp_path / "w", small_world(tmp_path), accuracy)
    for one in CONTESTANTS.values():
        tried = {(run.rate, run.seed) for run in contest.ledger.runs if run.arm == one.arms[0] and run.seed in TUNING}
        assert tried == {(rate, seed) for rate in rates(contest.world) for seed in TUNING}
    chosen = contest.chosen()
    assert chosen["decay"].arm == "baseline | weight_decay=0.3" and chosen["plain"].rate == 0.00178


def test_a_search_goes_beyond_its_grid_where_the_best_rate_is_at_an_end(tmp_path):
    world = small_world(tmp_path)
    contest = filled(tmp_path / "w", world, lambda run, split: accuracy(run, split, best=0.0178))
    plain = contest.plain()
    assert plain is not None and plain.is_inside and plain.rate == 0.0178 and plain.rate not in rates(world)
    never = filled(tmp_path / "v", world, lambda run, split: accuracy(run, split, best=10))
    assert never.plain() is not None and not never.plain().is_inside


def test_only_final_seeds_read_the_test_split(tmp_path):
    world = small_world(tmp_path)
    task = world.built()
    assert run_once(task, "baseline", 1e-3, TUNING[0], reads_test=False).test is None
    final = run_once(task, "baseline", 1e-3, FINAL[0], reads_test=True)
    assert final.test is not None and not set(FINAL) & {*TUNING, *SEEDS}
    assert run_once(task, "baseline", 1e-3, FINAL[0], reads_test=True).test == final.test


def test_the_gain_is_against_the_best_plain_model_at_any_chosen_rate(tmp_path):
    def lucky(run, split):
        # on validation data another rate looks best; on test data that of drop-head is the best for the plain model too
        if run.arm.startswith("DropHead"):
            return accuracy(run, split, best=0.00562)
        return accuracy(run, split, best=0.00562 if split == "test" else 0.00178)

    contest = filled(tmp_path / "w", small_world(tmp_path), lucky)
    assert contest.chosen()["drop-head"].rate == 0.00562 and contest.plain().rate == 0.00178
    assert contest.best_plain() == 0.00562
    row = next(row for row in rows(contest) if row.contestant == "drop-head")
    assert row.to_plain.mean == pytest.approx(0, abs=1e-9)


def test_the_two_searches_of_the_plain_model_come_first_with_their_own_gains(tmp_path):
    contest = filled(tmp_path / "w", small_world(tmp_path), accuracy)
    first, second, *others = rows(contest)
    assert (first.contestant, second.contestant) == (TUNED, FURTHER)
    # the usual rate is a quarter of a decade from the best: 0.025 of about 0.42 errors
    assert first.to_plain.mean == pytest.approx(0.025 / 0.422, rel=0.02) and second.to_plain.mean == 0
    assert suffices(contest) and others[0].contestant == "decay"


def test_a_search_that_a_repetition_moves_is_repeated_until_none_does(tmp_path):
    def narrow(run, split):
        # a peak between two rates of the grid, which half steps alone find
        return accuracy(run, split) + (0.1 if run.rate == 0.00237 else 0)

    contest = filled(tmp_path / "w", small_world(tmp_path), narrow)
    assert contest.move(0) > 1 and contest.move(1) == 0 and suffices(contest)
    assert [one.rate for one in contest.again()] == [0.00237] * 2 and contest.best_plain() == 0.00237


def test_a_search_that_every_repetition_moves_does_not_suffice(tmp_path):
    peaks = {seed: rate for seeds, rate in zip(AGAIN, (0.00133, 0.00237, 0.00422), strict=True) for seed in seeds}

    def wandering(run, split):
        if run.seed in peaks:
            return 0.9 if run.rate == peaks[run.seed] else accuracy(run, split)
        better = {0.00133: 0.1, 0.00237: 0.2, 0.00422: 0.3}.get(run.rate, 0.0)
        return accuracy(run, split) + (better if split == "test" else 0)

    contest = filled(tmp_path / "w", small_world(tmp_path), wandering)
    assert contest.state == "complete" and contest.move() > 1 and not suffices(contest)
    assert advised([contest])["too little training"] == []


def test_a_world_whose_premise_fails_is_run_no_further(tmp_path):
    def no_room(run, split):
        return accuracy(Run(run.arm, run.rate, run.seed), split)

    contest = filled(tmp_path / "w", small_world(tmp_path), no_room)
    assert contest.state == "failed" and [one.name for one in contest.premises() if not one.holds] == ["room"]
    assert not any(run.seed in FINAL for run in contest.ledger.runs)
    assert tables([contest])["premises"] and not tables([contest])["gains"]


@pytest.mark.parametrize(
    ("symptom", "train", "holds"),
    [("memorising", 0.9, True), ("memorising", 0.7, False), ("few examples", 0.7, True), ("few examples", 0.5, False)],
)
def test_symptoms_are_tested(tmp_path, symptom, train, holds):
    def figures(run, split):
        return train if split == "train" else accuracy(run, split)

    contest = filled(tmp_path / "w", small_world(tmp_path, symptom=symptom), figures)
    assert next(one for one in contest.premises() if one.name == "symptom").holds is holds


@pytest.mark.parametrize(("best", "holds"), [(0.00562, True), (0.00178, False)])
def test_the_eased_world_of_depth_has_a_rate_of_its_own(tmp_path, best, holds):
    """Two layers want a higher rate than eight: at that of the eight they look worse than they are."""

    def shallow(run, split):
        away = abs(torch.log10(torch.tensor(run.rate / (best if run.eased else 0.000562))).item())
        return 0.6 - 0.1 * away + 0.05 * run.eased * (1 if holds else -1)

    world = small_world(tmp_path, symptom="depth", eased={"depth": 2})
    contest = filled(tmp_path / "w", world, shallow)
    eased = {(run.rate, run.seed) for run in contest.ledger.runs if run.eased and run.seed in TUNING}
    assert eased == {(rate, seed) for rate in rates(world) for seed in TUNING}
    assert {run.rate for run in contest.ledger.runs if run.eased and run.seed in SEEDS} == {
        min(rates(world), key=lambda rate: abs(torch.log10(torch.tensor(rate / best)).item()))
    }
    assert next(one for one in contest.premises() if one.name == "room").holds is holds


def test_unstable_training_needs_failures_at_the_usual_rate(tmp_path):
    world = small_world(tmp_path, symptom="unstable training", eased={})

    def fails(run, split):
        return None if run.rate == world.usual_rate and run.seed % 2 else accuracy(run, split)

    contest = filled(tmp_path / "w", world, fails)
    told = next(one for one in contest.premises() if one.name == "symptom")
    assert told.holds and told.figure == 0.5
    assert not filled(tmp_path / "v", world, accuracy).premises()[-1].holds


def test_a_world_in_which_every_plain_run_diverges_stops_with_a_sentence(tmp_path):
    world = small_world(tmp_path)

    def lost(run, split):
        return None if run.seed in FINAL else accuracy(run, split)

    with pytest.raises(StudyError, match="dots: every final run of the plain model diverged"):
        filled(tmp_path / "w", world, lost)


def test_targets_that_cannot_be_learned_end_a_world_at_its_premises(tmp_path):
    world, told = small_world(tmp_path, task="Nowhere"), []
    contest = Contest.of(world, CONTESTANTS, tmp_path / "w")
    carry_out(contest, None, told.append)
    assert contest.state == "failed" and "failed" in told[-1]
    assert told[-1].endswith("Every run of the plain model diverged: check its targets and its loss")
    assert all(figures.diverged for figures in contest.ledger.runs.values())


def test_a_contest_resumes_from_any_line_and_makes_no_run_twice(tmp_path):
    world, contestants = small_world(tmp_path), {"plain": CONTESTANTS["plain"]}
    contest, made = Contest.of(world, contestants, tmp_path / "w"), []
    carry_out(contest, None, made.append, lambda: len(contest.ledger.runs) >= 4)
    path = tmp_path / "w" / FILE
    whole = path.read_text()
    # a process killed in the middle of its fifth line
    path.write_text(whole + "0,baseline,0.001,10")
    again = Contest.of(world, contestants, tmp_path / "w")
    # reading writes nothing
    assert len(again.ledger.runs) == 4 and path.read_text().startswith(whole)
    carry_out(again, None, made.append, lambda: len(again.ledger.runs) >= 6)
    assert len(path.read_text().splitlines()) == 7


def test_what_is_told_of_the_runs_left_is_near_and_ends_at_none(tmp_path):
    contest, lines, left = filled(tmp_path / "w", small_world(tmp_path), accuracy), [], []
    runs = list(contest.ledger.runs.items())
    contest.ledger.runs.clear()
    told = contest.runs_left()
    assert 0.7 * len(runs) < told < 1.3 * len(runs)
    progress = Progress(contest, lines.append)
    for run, figures in runs:
        progress.next(run)
        left.append(len(contest.ledger.runs) + contest.runs_left())
        contest.ledger.runs[run] = figures
        progress.count()
    assert contest.runs_left() == 0 and contest.state == "complete"
    # a total that a last line gives is never below the runs that were made
    assert min(left) >= 0.7 * len(runs) and left[-1] == len(runs)
    stages = [re.fullmatch(r"dots: runs \d+/\d+, now (.+), about .+ left", line)[1] for line in lines]
    assert stages == ["plain", "premises", "plain", "decay", "drop-head", "plain", "plain again"]


def test_a_figure_is_the_same_before_and_after_a_resumption(tmp_path):
    ledger, run = Ledger(tmp_path / "w", "0"), Run("baseline", 1e-3, 0)
    ledger.add(run, Figures(2 / 3, 0.123456789, None, 0.1))
    assert ledger.runs[run] == Ledger(tmp_path / "w", "0").runs[run] == Figures(0.666667, 0.123457, None, 0.1)


def test_an_edit_changes_only_the_worlds_that_use_what_was_edited(tmp_path):
    classes = used(TASK, ["Dots"])
    assert used(TASK.replace("return 1", "return 2"), ["Dots"]) == classes
    assert used(TASK.replace("return 1", "# why\n    return 1").replace("their brightest", "the"), ["Dots"]) == classes
    assert used(TASK.replace('float("nan")', "2"), ["Dots"]) == classes != used(TASK, ["Nowhere"])
    # a function and a constant that the class uses
    for old, new in (("avg_pool2d(images, 2)", "avg_pool2d(-images, 2)"), ('"train": 64', '"train": 32')):
        assert used(TASK.replace(old, new), ["Dots"]) != classes


def test_a_world_is_known_by_what_it_computes_and_not_by_its_path(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    one, other = (small_world(tmp_path / folder) for folder in ("a", "b"))
    assert one.digest() == other.digest() != small_world(tmp_path / "a", settings={"dim": 16}).digest()
    Contest.of(one, CONTESTANTS, tmp_path / "w").ledger.add(Run("baseline", 1e-3, 0), Figures(1, 1, 1, 0.1))
    with pytest.raises(StudyError, match="another version of this world"):
        Ledger(tmp_path / "w", "123456789012")


def test_an_arm_that_a_world_does_not_take_is_refused_with_its_reason(tmp_path):
    shift = Contestant(name="augmentation", kind="control", arms=("baseline | augmentation=0.5",), reason="r")
    world = small_world(tmp_path)
    assert "augmentation" in why_refused(shift, world.built()) and not why_refused(CONTESTANTS["decay"], world.built())
    contest = Contest.of(world, {"plain": CONTESTANTS["plain"], "augmentation": shift}, tmp_path / "w")
    told = []
    carry_out(contest, None, told.append, lambda: True)
    # where the minutes are spent, what there is so far is told too
    assert told == ["dots: not run, 0 runs"]
    assert contest.ledger.notes["augmentation"].startswith("refused: ")


def test_a_contestant_that_changes_nothing_is_named_on_the_page(tmp_path):
    def same_but_for_drop_head(run, split):
        differs = run.arm.startswith("DropHead") and run.rate == rate_at(world, 0.25) and run.seed == TUNING[0]
        return accuracy(Run("baseline", run.rate, run.seed, run.eased), split) - 0.01 * differs

    world = small_world(tmp_path)
    contest = filled(tmp_path / "w", world, same_but_for_drop_head)
    assert contest.state == "complete"
    assert [name for name in CONTESTANTS if contest.is_idle(name)] == ["decay"]
    assert "these change nothing: decay in Dots." in page([contest])
    # one of its two strengths is enough to differ
    stronger = next(run for run in contest.ledger.runs if run.arm.endswith("0.3") and run.seed == TUNING[0])
    contest.ledger.runs[stronger] = Figures(0.1, 0.1, 0.1, 0.1)
    assert not contest.is_idle("decay")


def test_a_contestant_whose_run_breaks_is_noted_and_the_others_go_on(tmp_path, monkeypatch):
    from headwise_papers.league import contest as module

    def made(task, arm, rate, seed, *, reads_test, device):
        if arm.startswith("DropHead"):
            raise RuntimeError("it breaks")
        values = [accuracy(Run(arm, rate, seed, task.steps == 6), split) for split in ("train", "validation", "test")]
        return Figures(*values[:2], values[2] if reads_test else None, 0.1)

    monkeypatch.setattr(module, "run_once", made)
    contest, told = Contest.of(small_world(tmp_path), CONTESTANTS, tmp_path / "w"), []
    contest.facts |= {"constant": 0.9, "simple": 0.9}
    carry_out(contest, None, told.append)
    assert contest.ledger.notes["drop-head"] == "failed: RuntimeError: it breaks" and contest.state == "complete"
    assert [row.contestant for row in rows(contest)] == [TUNED, FURTHER, "decay"]


def test_a_diverged_run_counts_as_failure(tmp_path):
    errors = Errors({Run("baseline", 1e-3, 0): Figures(None, None, None, 0.1)}, failure=0.25)
    assert errors.of(Run("baseline", 1e-3, 0), "test") == 0.75 and errors.of(Run("baseline", 1e-3, 1)) is None
    found = search(small_world(tmp_path), CONTESTANTS["plain"], errors)
    assert not isinstance(found, Chosen) and len(found) == 18


@pytest.mark.parametrize(
    ("part", "text", "why"),
    [
        ("arms", 'kind = "method"\narms = []\nreason = "r"', "arms: .*at least 1"),
        ("small_worlds", 'symptom = "bad luck"', "Repair the file"),
        ("small_worlds", "title = ", "not valid TOML"),
    ],
)
def test_an_invalid_file_is_named(tmp_path, part, text, why):
    (tmp_path / part).mkdir()
    (tmp_path / part / "mine.toml").write_text(text)
    with pytest.raises(StudyError, match=why):
        (read_contestants if part == "arms" else read_small_worlds)([tmp_path])
