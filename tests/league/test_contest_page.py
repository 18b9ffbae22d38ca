"""The page of the second edition says on its first screen what transfers, and nothing beyond its worlds."""

import csv
import io
from pathlib import Path

import pytest
from contests import filled, small_world
from headwise_papers.league.contest_page import page
from headwise_papers.league.contest_tables import tables
from headwise_papers.league.run_ledger import Run

DOCS = Path(__file__).parents[2] / "docs"


def contest(tmp_path, name, gain, *, noise=0.002):
    """Return a complete world in which drop-head avoids `gain` of about 0.4 errors, with noise between seeds."""

    def accuracy(run, split):
        # all arms share most of a seed's luck, as they share its draws
        luck = 0.01 * (run.seed % 5) + noise * ((run.seed * 7 + len(run.arm)) % 3)
        better = gain if run.arm.startswith("DropHead") else 0.1 if run.eased else 0.0
        away = 0.0 if run.rate == 0.00178 else 0.05
        return 0.55 - away + luck + better

    return filled(tmp_path / name, small_world(tmp_path, name=name), accuracy)


def lead(contests):
    return page(contests).partition("## Symptom by symptom")[0]


def test_what_gains_in_each_world_left_out_is_to_be_tried_first(tmp_path):
    contests = [contest(tmp_path, name, gain) for name, gain in (("a", 0.1), ("b", 0.12), ("c", 0.11))]
    text = lead(contests)
    assert "**too little training: try drop-head first**" in text and "Tune the learning rate" in text
    assert "| A | drop-head |" in page(contests) and "No answer yet for memorising, few examples" in text


def test_what_fails_in_one_world_is_not_advised_and_the_page_says_that_nothing_transfers(tmp_path):
    contests = [contest(tmp_path, name, gain) for name, gain in (("a", 0.1), ("b", 0.12), ("c", -0.1))]
    text = lead(contests)
    assert text.startswith("**Nothing was shown to transfer** (too little training)") and "try drop-head" not in text
    assert "| C | drop-head | −2" in page(contests)
    how = page(contests).partition("## How the answers were found")[2]
    assert "Of 6 gains in single worlds, 2 have an interval above 0, all on images, and 1 one below." in how


def test_two_worlds_give_no_advice(tmp_path):
    contests = [contest(tmp_path, name, 0.1) for name in ("a", "b")]
    assert lead(contests).startswith("**No symptom has 3 complete worlds yet") and not tables(contests)["symptoms"]


def test_worlds_that_were_not_run_or_whose_premise_fails_are_listed_as_that(tmp_path):
    never = filled(tmp_path / "n", small_world(tmp_path, name="never"), lambda run, split: 0.2)
    text = page([never])
    assert "| a premise fails |" in text and "✗ learned" in text
    assert text.startswith("**No world was run to its end yet")


@pytest.mark.parametrize("column", ["mean", "high", "test_error"])
def test_figures_are_computed_again_by_other_code(tmp_path, monkeypatch, column):
    monkeypatch.syspath_prepend(DOCS)
    import recompute

    contests = [contest(tmp_path, name, gain) for name, gain in (("a", 0.1), ("b", 0.12), ("c", -0.1))]
    # a run that no figure may use: of the eased world, at a final seed
    contests[0].ledger.add(Run("baseline", 0.00178, 0, eased=True), next(iter(contests[0].ledger.runs.values())))
    found = tables(contests)

    def write():
        for name, rows in found.items():
            stream = io.StringIO()
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
            (tmp_path / f"{name}.csv").write_text(stream.getvalue())
        return recompute.second_league_mismatches(tmp_path)

    count, wrong = write()
    assert count == 40 and wrong == []
    found["gains"][2][column] += 0.001
    assert len(write()[1]) == 1
