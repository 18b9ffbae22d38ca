"""Entries and worlds are files, and one that cannot be is refused by name with what is wrong."""

import re

import pytest
from headwise_papers.league.files import read_entries, read_worlds
from headwise_papers.league.space import Declared
from leagues import ENTRIES, write_source

from headwise.lab.experiments.task_source import build_task, load_task
from headwise_verdict.files.errors import StudyError


def entry(tmp_path, arm, more="", kind="method", name="ours"):
    write_source(tmp_path, {"plain": ENTRIES["plain"], name: (arm, kind, more)})
    return read_entries([tmp_path])[name]


def space(tmp_path, arm, more=""):
    found = entry(tmp_path, arm, more)
    return Declared(found, read_worlds([tmp_path])["dots"].built())


def test_the_plain_model_comes_first_then_controls_then_methods(tmp_path):
    assert list(read_entries([write_source(tmp_path)])) == ["plain", "smaller", "drop-head"]


@pytest.mark.parametrize(
    ("arm", "more", "message"),
    [
        (
            "DropHead(p=0.2)",
            "p = [0.5, 0.1]\n",
            r"ours.toml: search.p: a range needs its lower end first, got \[0.5, 0.1\]",
        ),
        ("DropHead(p=0.2)", "p = 3\n", r"ours.toml: search.p"),
        ("DropHead(p=0.2)", "p = { choices = [0.2] }\n", r"ours.toml: search.p"),
        ("DropHead(p=0.2)", "p = [\n", r"ours.toml is not valid TOML"),
    ],
)
def test_a_file_that_is_no_entry_is_refused_by_name(tmp_path, arm, more, message):
    with pytest.raises(StudyError, match=message):
        entry(tmp_path, arm, more)


@pytest.mark.parametrize(
    ("arm", "more", "message"),
    [
        (
            "DropHead(p=0.2)",
            "q = [0.1, 0.5]\n",
            r"entry ours: it searches q, which is neither a field of DropHead\(p=0.2\) nor a setting that",
        ),
        ("DropHead(p=0.2)", "p = [0.3, 0.5]\n", r"entry ours: as written, p is 0.2, outside of the searched range"),
        ("DropHead(p=0.2)", "p = [0.1, 1.5]\n", r"entry ours: at .*1.5.* it is invalid: "),
        ("baseline | dim=4", "dim = { choices = [4, 8] }\n", r"entry ours: at .*8.* it equals the plain model"),
        (
            "DropHead(p=0.2) | learning_rate=0.1",
            "p = [0.1, 0.5]\n",
            r"entry ours: its arm fixes learning_rate, which is searched",
        ),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_any_run(tmp_path, arm, more, message):
    with pytest.raises(StudyError, match=message):
        space(tmp_path, arm, more)


def test_points_become_arms(tmp_path):
    found = space(
        tmp_path,
        "DropHead(p=0.2) + DropKey(p=0.1) | weight_decay=0.1",
        '"DropKey.p" = [0.05, 0.3]\nweight_decay = [0.01, 1.0]\n',
    )
    assert found.first() == {"learning_rate": 1.0, "DropKey.p": 0.1, "weight_decay": 0.1}
    choice = found.choice({"learning_rate": 0.5, "DropKey.p": 0.12345, "weight_decay": 0.31234})
    assert choice.label == "DropHead(p=0.2) + DropKey(p=0.123) | weight_decay=0.312" and choice.rate == 0.0005


def test_whole_numbers_words_and_ranges_through_zero_are_searched_as_such(tmp_path):
    optuna = pytest.importorskip("optuna")
    found = space(
        tmp_path,
        "GFSA(order=4) + AttentionSink() + GatedOutput()",
        'order = [2, 8]\nlogit = [-1.0, 1.0]\nper = { choices = ["head", "element"] }\n',
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    points = [found.ask(study.ask()) for _ in range(30)]
    assert {type(point["order"]) for point in points} == {int} and {point["order"] for point in points} == set(
        range(2, 9)
    )
    assert min(point["logit"] for point in points) < 0 < max(point["logit"] for point in points)
    assert {point["per"] for point in points} == {"head", "element"}


def test_two_files_of_one_arm_or_name_and_a_league_without_a_plain_model_are_refused(tmp_path):
    one, other = (
        write_source(tmp_path / "one"),
        write_source(tmp_path / "other", {"again": ("DropHead( p=0.2 )", "method", "p = [0.1, 0.3]\n")}),
    )
    with pytest.raises(StudyError, match=r"the entries (again and drop-head|drop-head and again) are one arm"):
        read_entries([one, other])
    with pytest.raises(StudyError, match=r"have one name, dots. Rename one"):
        read_worlds([one, other])
    (other / "entries" / "again.toml").rename(other / "entries" / "new.toml")
    with pytest.raises(StudyError, match="one plain entry, whose arm is 'baseline'; found none"):
        read_entries([other])
    with pytest.raises(StudyError, match=r"there are no worlds in no folder .*Install headwise-papers"):
        read_worlds([])


def test_a_world_of_no_task_or_setting_is_refused_by_name(tmp_path):
    world = read_worlds([write_source(tmp_path, settings="[settings]\nepoch = 3\n")])["dots"]
    with pytest.raises(
        StudyError, match=re.escape("world dots: Dots does not take these settings: epoch: there is no such setting.")
    ):
        world.built()
    assert build_task(load_task(world.task), {}).epochs == 2
