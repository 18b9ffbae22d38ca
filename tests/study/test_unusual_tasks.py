"""Tasks with settings of every kind, and what they may tell wrongly of themselves: told by name, before the first
step."""

from pathlib import Path

import pytest
from small_studies import carry, orders, study_of
from unusual_tasks import Colour, Unusual

from headwise.lab.comparing.choosing import choose_study
from headwise.lab.comparing.plan import check_arms
from headwise.lab.comparing.request import Request
from headwise.lab.experiments.arm import read_arm
from headwise.lab.experiments.arm_settings import read_settings
from headwise.lab.experiments.task import Task
from headwise.lab.experiments.task_source import build_task, load_task
from headwise.lab.studies.registry import Installed, load_study, study_names
from headwise.lab.training.execution import execute
from headwise.lab.training.preflight import check_task
from headwise_verdict.files.errors import StudyError

PLACE = str(Path(__file__).with_name("unusual_tasks.py"))

VALUES = [
    ("folder_of_words", Path("more words/here")),
    ("folder_of_words", Path("words.txt")),
    ("colour", Colour.blue),
    ("several", frozenset({3, 4})),
    ("several", frozenset()),
    ("pairs", ((None, "a, b"), (2, "c"))),
    ("table", {"one": Path("x y")}),
    ("word", "ends with \\"),
    ("word", 'it\'s "quoted" \\" | @ {1,2}\n\t→'),
    ("word", "none"),
    ("word", ""),
    ("anything", (1, "1", None)),
    ("anything", (True, 1, "true")),
    ("between", (-0.5, float("inf"))),
]


@pytest.mark.parametrize(("name", "value"), VALUES, ids=repr)
def test_a_change_of_a_setting_of_any_kind_is_read_back_as_it_was_written(name, value):
    task = Unusual()
    arm = read_arm("baseline", task).changed(task, **{name: value})
    again = read_arm(arm.text, task)
    assert getattr(again.task(task), name) == value
    assert again.text == arm.text


@pytest.mark.parametrize("text", ["epochs=true", "learning_rate=True", "warmup=false"])
def test_true_is_no_number(text):
    with pytest.raises(StudyError, match=r"Input should be a v"):
        read_settings(text, Unusual())


@pytest.mark.parametrize("name", ["warmup", "eps", "clip"])
def test_a_number_without_end_is_no_setting_of_a_recipe(name):
    with pytest.raises(StudyError, match=f"{name}: Input should be a finite number"):
        build_task(Unusual, {name: float("inf")})


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("baseline | learning_rate=0.001",), r"is the baseline: learning_rate=0.001 holds there too"),
        (("DropHead() | fog=0.1", "DropHead()"), r"are the same arm, DropHead\(p=0.2\) \| fog=0.1\. Give one of them"),
        (("DropHead() @ 0-999999999",), "asks for depth 999999999, which no model has"),
    ],
)
def test_arms_that_differ_in_words_alone_are_refused(texts, message):
    with pytest.raises(StudyError, match=message):
        choose_study(Request(task=f"{PLACE}:Unusual", device="cpu", methods=texts))


def test_two_writings_of_one_axis_are_refused():
    request = Request(task=f"{PLACE}:Unusual", device="cpu", sweeps=("DropHead(p={0.1,0.2})", "DropHead(p={.2,.1})"))
    with pytest.raises(StudyError, match="are the same axis"):
        choose_study(request)


@pytest.mark.parametrize("name", [name for name in study_names() if hasattr(load_study(name), "STUDY")])
def test_a_built_in_study_can_be_chosen_at_every_scale(name):
    # an arm of sigma-lm names the learning rate that one scale has anyway
    for scale in (None, *load_study(name).STUDY.scales):
        choose_study(Request(study=name, studies=Installed(), device="cpu", scale=scale))


def test_an_arm_may_not_change_the_examples_of_any_evaluation():
    with pytest.raises(StudyError, match=r"its changes \(fog\) give it other fog examples than the baseline's"):
        check_arms([read_arm("baseline | fog=0.2", Unusual())], Unusual())
    # a value that is missing in both is no difference
    check_arms([read_arm("baseline | word=b", Unusual())], Unusual(fault="missing value"))


@pytest.mark.parametrize(
    ("task", "fault", "message"),
    [
        ("Unusual", "when", r"the evaluation 'more' is made 'phases'\. Did you mean 'phase'\? Write one of end, phase"),
        ("Unusual", "limit", "the evaluation 'more' has the limit -1"),
        ("Unusual", "no name", "names an evaluation ''"),
        ("Unusual", "name of the core", "names an evaluation 'gap'"),
        ("Unusual", "no evaluation", r"evaluations\(\) returned 'more'; return a list of headwise.study.Evaluation"),
        ("Unusual", "raises", r"evaluations\(\) fails: ZeroDivisionError: .* \(line \d+ of unusual_tasks.py"),
        ("Slashed", "", "names a metric 'top/1'"),
        ("Worded", "", r"metrics holds 'accuracy'; give a tuple of headwise.study.Metric"),
        ("Single", "", r"metrics holds Metric\(name='accuracy'"),
    ],
)
def test_what_a_task_lists_wrongly_is_refused_by_name(task, fault, message):
    with pytest.raises(StudyError, match=message):
        check_task(load_task(f"{PLACE}:{task}")(fault=fault))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("LongAtLast", "an example of LongAtLast has 100 tokens, more than tokens_per_batch=64"),
        ("Unjudged", r"weight\(\) counts the targets, and batch\(\) returned none"),
    ],
)
def test_what_only_the_end_would_show_is_told_before_the_first_step(tmp_path, task, message):
    (order,) = orders(study_of(f"{PLACE}:{task}"), tmp_path)
    with pytest.raises(StudyError, match=message):
        execute(order, lambda event: None)
    assert not (order.folder / "metrics.jsonl").exists()


def test_a_transform_gets_the_inputs_of_a_dict(tmp_path):
    (result,) = carry(study_of(f"{PLACE}:Named"), tmp_path)
    assert result["status"] == "finished"


def test_a_batch_of_inputs_alone_as_0_2_had_it_is_refused_with_its_new_name():
    with pytest.raises(TypeError, match=r"Old\.batch\(inputs, generator\).*: call it transform\(inputs, generator\)"):

        class Old(Task):
            def batch(self, inputs, generator):
                return inputs


def test_arms_and_phases_may_differ_in_their_precision(tmp_path):
    results = carry(study_of(f"{PLACE}:Halved", ("baseline | dtype=bfloat16",)), tmp_path)
    assert [result["status"] for result in results] == ["finished", "finished"]
    full, half = (result["metrics"]["test/loss"] for result in results)
    assert full != half and full == pytest.approx(half, rel=0.05)
    (alone,) = carry(study_of(f"{PLACE}:Halved"), tmp_path / "alone")
    assert alone["metrics"]["test/loss"] == full
