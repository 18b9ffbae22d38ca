"""An arm that cannot be is told before any arm trains, and one fault of all runs is told once."""

import re

import pytest
from grids import part_of_grid
from small_studies import carry, study_of, tiny_study
from test_engines import Engine, headwise

from headwise.lab.comparing.plan import clock
from headwise_verdict.files.errors import StudyError

PLAIN = """
import torch
from headwise.study import Task


class NoAttention(Task):
    epochs: int = 2
    batch_size: int = 8
    wrong: bool = False

    def model(self):
        return torch.nn.Linear(4, 2 if not self.wrong else no_such_name)

    def data(self, split):
        return torch.randn(24, 4), torch.arange(24) % 2
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    return f"{tmp_path / 'plain.py'}:NoAttention"


@pytest.mark.parametrize("jobs", part_of_grid([None, 2], [None]))
def test_a_model_without_attention_is_refused_before_the_baseline_trains(tmp_path, place, jobs):
    study = study_of(place, ("DropHead(p=0.3)", "RelaxedAttention(gamma=0.2)"), seeds=2)
    refused = pytest.raises(StudyError, match=r"(?s)DropHead\(p=0.3\).*attention.*Nothing was trained")
    if jobs is None:
        with refused:
            carry(study, tmp_path / "out")
    else:
        with Engine(jobs) as engine, refused:
            carry(study, tmp_path / "out", engine)
    assert not list((tmp_path / "out").rglob("metrics.jsonl"))


def test_the_rehearsal_of_arms_changes_no_number_and_is_not_made_again(tmp_path, monkeypatch):
    from headwise.lab.comparing import compare

    study = tiny_study(methods=("DropHead(p=0.3)",))
    made = []
    once = carry(study, tmp_path / "with")
    monkeypatch.setattr(compare, "_rehearse", made.append)
    other = carry(study, tmp_path / "without")
    assert made

    def computed(result):
        return {name: value for name, value in result["metrics"].items() if "seconds" not in name}

    assert list(map(computed, once)) == list(map(computed, other))


@pytest.mark.grid
def test_semaphores_of_a_library_in_a_worker_leave_no_warning(tmp_path):
    text = PLAIN.replace("import torch\n", "import torch\nimport multiprocessing\nkept = multiprocessing.RLock()\n", 1)
    (tmp_path / "plain.py").write_text(text)
    place = f"{tmp_path / 'plain.py'}:NoAttention"
    done = headwise(
        "compare",
        "--task",
        place,
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--method",
        "baseline | learning_rate=0.01",
        "--out",
        str(tmp_path / "out"),
    )
    _, said = done.communicate(timeout=300)
    assert done.returncode == 0 and "semaphore" not in said, said


@pytest.mark.grid
def test_a_mistake_in_model_is_told_once_in_one_sentence(tmp_path, place):
    command = (
        "compare",
        "--task",
        place,
        "--set",
        "wrong=true",
        "--method",
        "baseline | learning_rate=0.01",
        "--seeds",
        "3",
    )
    done = headwise(*command, "--jobs", "2", "--out", str(tmp_path / "out"))
    _, said = done.communicate(timeout=300)
    assert done.returncode == 1
    assert said.count("name 'no_such_name' is not defined") == 1, said
    assert "the same in" in said and "other run" in said
    assert '"learning_rate"' not in said and "{" not in said


def test_a_mistake_in_model_is_told_once_where_arms_have_methods(tmp_path, place):
    study = study_of(place, ("DropHead(p=0.3)", "RelaxedAttention(gamma=0.2)"), seeds=2, wrong=True)
    with pytest.raises(StudyError) as told:
        carry(study, tmp_path / "out")
    assert str(told.value).count("no_such_name") == 1


def test_the_plan_says_what_will_follow_and_trains_nothing(tmp_path):
    from small_studies import Silent

    study, listener = tiny_study(methods=("DropHead(p=0.3)", "DropHead(p=0.3) @ 0"), seeds=3), Silent()
    assert carry(study, tmp_path, listener=listener, plan_only=True, jobs=2) == []
    said = "\n".join(listener.said)
    assert "plan:   9 runs, each arm tried for a batch" in said and "time:   about" in said and "2 at a time" in said
    assert re.search(r"DropHead\(p=0.3\): 2 of 2 layers, [\d.]+ ms a step, .* a run", said), said
    assert "DropHead(p=0.3) @ 0: 1 of 2 layers" in said and "disk:   at most" in said
    assert max(map(len, listener.said)) <= 80 and not list(tmp_path.rglob("config.json"))


def test_a_step_that_only_an_arm_cannot_take_is_told_before_the_first_run(tmp_path, monkeypatch):
    from headwise.attend.regularizing.handle import Regularized

    def refuse(handle):
        raise StudyError("no step can be taken")

    monkeypatch.setattr(Regularized, "after_step", refuse)
    with pytest.raises(StudyError, match=r"(?s)^DropHead\(p=0.3\): no step can be taken.*Nothing was trained"):
        carry(tiny_study(methods=("DropHead(p=0.3)",)), tmp_path)
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01, "0.1 s"), (2.34, "2.3 s"), (112, "112 s"), (150, "2.5 min"), (7000, "117 min"), (2e8, "2,315 days")],
)
def test_a_plan_writes_no_time_with_a_power_of_ten(seconds, text):
    assert clock(seconds) == text
