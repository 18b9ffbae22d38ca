"""Arms: one text is label, key and argument; read, written back, fitted, checked before training."""

import re

import pytest
import torch
from small_studies import PLACE

from headwise.attend.core.schedule import ByDepth, Ramp, VShape
from headwise.lab.comparing.plan import check_arms
from headwise.lab.experiments.arm import SAME, read_arm, read_arms
from headwise.lab.experiments.arm_settings import read_setting, read_timed
from headwise.lab.experiments.study import read_sweep
from headwise.lab.experiments.task_source import load_task
from headwise.lab.studies.registry import load_study, study_names
from headwise.lab.training.execution import fit
from headwise_verdict.files.errors import StudyError


@pytest.fixture
def task():
    return load_task(f"{PLACE}:Tiny")()


CANONICAL = {
    "DropHead": "DropHead(p=0.2)",
    "DropHead(p=0.1)+ RelaxedAttention( )": "DropHead(p=0.1) + RelaxedAttention(gamma=0.1)",
    "NeuTRENO(strength=0.6) @ 2, 1": "NeuTRENO(strength=0.6) @ 1-2",
    "NeuTRENO(strength=0.6) @0,2 - 4,9": "NeuTRENO(strength=0.6) @ 0,2-4,9",
    "NeuTRENO(strength=0.6) @ encoder.*": "NeuTRENO(strength=0.6) @ encoder.*",
    "NeuTRENO(strength=.6) | epochs=3, batch_size=4 @ enc": "NeuTRENO(strength=0.6) @ enc | batch_size=4, epochs=3",
    "baseline|attention_weight_decay=.30": "baseline | attention_weight_decay=0.3",
    "baseline | learning_rate=1": "baseline | learning_rate=1.0",
    "baseline | optimizer='sgd', momentum=0": "baseline | momentum=0.0, optimizer=sgd",
    "baseline | betas=(0.9, .98), clip=None": "baseline | betas=(0.9, 0.98), clip=none",
    'SigmaReparam(init="one") | optimizer=lars, learning_rate=0.1': (
        'SigmaReparam(init="one") | learning_rate=0.1, optimizer=lars'
    ),
    "Temperature(value=1 -> .1 at 50%)": "Temperature(value=1.0 -> 0.1 at 50%)",
    "Temperature(value=1.0 -> 0.1 at 300) @ 1": "Temperature(value=1.0 -> 0.1 at 300) @ 1",
    "NeuTRENO(strength=Ramp(start=0, end=0.6, steps=20%))": "NeuTRENO(strength=0.0 -> 0.6 over 20%)",
    "NeuTRENO(strength=0 -> 0.6 at 66% over 5%)": "NeuTRENO(strength=0.0 -> 0.6 at 66% over 5%)",
    "DropHead(p=VShape(end=.2,start=0.1,total=100%,warmup=10))": (
        "DropHead(p=VShape(start=0.1, end=0.2, warmup=10, total=100%))"
    ),
    "DropHead(p=ByDepth(first=0.1, last=0)) + DropKey(p=0.1)": (
        "DropHead(p=ByDepth(first=0.1, last=0.0)) + DropKey(p=0.1)"
    ),
    " same ": "same",
    "baseline": "baseline",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_an_arm_is_written_back_in_one_form_that_reads_as_itself(text, task):
    arm = read_arm(text, task)
    assert arm.text == CANONICAL[text]
    assert read_arm(arm.text, task) == arm


def test_texts_of_a_tuple_stand_bare_as_one_text_does(task):
    names = ("attention_entropy", "token_cosine")
    for text in ("(attention_entropy, token_cosine)", "(attention_entropy, token_cosine,)", repr(names)):
        assert read_setting("head_statistics", text, task) == names
    assert read_setting("head_statistics", "(sink_mass)", task) == ("sink_mass",)


def test_the_order_of_the_parts_does_not_matter(task):
    one = read_arm("DropHead(p=0.1) @ 1 | epochs=3, learning_rate=0.1", task)
    assert read_arm("DropHead(p=0.1) | learning_rate=0.1, epochs=3 @ 1", task) == one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Temperature(value=VShap(start=1, end=1, warmup=10%, total=100%))",
            "no schedule 'VShap'. Did you mean 'VShape'?",
        ),
        ("Temperature(value=ramp(start=1, end=2, steps=9))", "no schedule 'ramp'. Did you mean 'Ramp'?"),
        (
            "Temperature(value=1.0 > 0.1 at 50%)",
            "cannot read a schedule from '1.0 > 0.1 at 50%'; write one of '1.0 -> 0.1",
        ),
        ("Temperature(value=1.0 - > 0.1 over 5)", "cannot read a schedule from '1.0 - > 0.1 over 5'; write one of"),
        ("Temperature(value=0.1 at 50%)", "cannot read a schedule from '0.1 at 50%'; write one of"),
        ("baseline | optimizer=adan", "optimizer=adan: Input should be 'adamw', 'adam'"),
        ("baseline | optimizer=adan", "Did you mean 'adam'?"),
        ("baseline | schedule=cosin", "Did you mean 'cosine'?"),
        ("DropHed(p=0.1)", "There is no method 'DropHed'. Did you mean 'DropHead'?"),
        ("basline", "Or did you mean 'baseline'?"),
        ("DropHead(q=0.1)", "DropHead has no setting 'q'. Its settings: p"),
        ("DropHead(q=0 -> 0.1 at 50%)", "DropHead has no setting 'q'"),
        ("DropHead(p=0 -> 2 at 50%)", "p=0.0 -> 2.0 at 50%: DropHead: p must lie in [0, 1), got 2.0"),
        (
            "RelaxedAttention(gamma=0 -> 0.1)",
            "cannot read a schedule from '0 -> 0.1'; write one of '1.0 -> 0.1 at 50%'",
        ),
        ("DropHead(p=0 -> 0.1 at 150%)", "'150%' in '0 -> 0.1 at 150%' is not a moment; write a share"),
        ("DropHead(p=0 -> 0.1 over 0%)", "lasts no step; write more than 0"),
        (
            "DropHead(p=VShape(start=0, end=0.1, warmup=50%, total=20%))",
            "warmup must end before total, got 50% and 20%",
        ),
        ("DropHead(p=VShape(start=0, end=0.1, total=20%))", "VShape needs warmup"),
        ("DropHead(p=ByDepth(start=0, last=0.1))", "ByDepth takes first=, last= once each; got 'start=0'"),
        ("QKNorm(eps=0 -> 1 at 50%)", "QKNorm"),
        ("baseline | lerning_rate=3", "Tiny has no setting 'lerning_rate'. Did you mean 'learning_rate'?"),
        ("baseline | learning_rate=fast", "learning_rate=fast: Input should be a valid number"),
        (
            "baseline | optimizer=sdg",
            "optimizer=sdg: Input should be 'adamw', 'adam', 'sgd', 'lars', 'adagrad', 'muon', 'muon-head', "
            "'muon-hyperball' or 'muon-stiefel'",
        ),
        ("baseline | momentum=0.9", "these settings: optimizer adamw has no momentum. Its settings: betas, eps"),
        ("baseline | epochs", "cannot read a setting from 'epochs'; write name=value"),
        ("baseline | epochs=1, epochs=2", "epochs is given twice"),
        (
            "baseline | train_size=3",
            "changes train_size, which choose the examples: arms are compared on the same data",
        ),
        ("baseline | epochs=1 | epochs=2", "says changes twice; write one '|'"),
        ("DropHead() @", "has nothing after '@'"),
        ("DropHead() @ 3-1", "'@ 3-1' runs backwards: write 1-3"),
        ("DropHead() @ the first", "cannot read layers from '@ the first'"),
        ("baseline @ 1", "baseline has no methods, so that '@ 1' has no meaning"),
        ("same | epochs=3", "same is the baseline again and changes nothing"),
        ("DropHead(p=0.1", "does not close a bracket"),
        ("DropHead(p=0.1))", "closes a bracket that was not opened"),
        ("DropHead() + DropHead()", "DropHead(p=0.2) is given twice"),
        ("DropHead() + ", "lacks a method"),
        ("", "lacks a method; write for example 'DropHead(p=0.2)', or 'baseline'"),
    ],
)
def test_a_mistake_in_an_arm_is_answered_with_what_was_meant(text, message, task):
    with pytest.raises(StudyError, match=re.escape(message)):
        read_arm(text, task)


def test_two_writings_of_one_arm_are_refused(task):
    texts = ["DropHead(p=0.1) | epochs=3", "baseline", "DropHead(p=0.10)|epochs=3"]
    with pytest.raises(StudyError, match=r"are the same arm, DropHead\(p=0.1\) \| epochs=3. Give one of them"):
        read_arms(texts, task)
    assert list(read_arms(texts[:2], task)) == ["DropHead(p=0.1) | epochs=3"]


def test_the_changes_of_an_arm_are_the_tasks_settings(task):
    arm = read_arm("baseline | optimizer=sgd, momentum=0.5, pause=1", task)
    changed = arm.task(task)
    expected = task.model_dump() | {"optimizer": "sgd", "momentum": 0.5, "pause": 1.0}
    assert changed.model_dump() == expected


def test_schedules_are_in_the_steps_of_the_run():
    assert read_timed("1 -> 0.1 at 50%").schedule(200) == Ramp(1.0, 0.1, steps=1, begin=99)
    assert read_timed("0 -> 0.6 at 60% over 10%").schedule(200) == Ramp(0.0, 0.6, steps=20, begin=120)
    assert read_timed("0 -> 0.6 over 30").schedule(200) == Ramp(0.0, 0.6, steps=30)
    assert read_timed("VShape(start=1, end=2, warmup=10%, total=100%)").schedule(200) == VShape(1.0, 2.0, 20, 200)
    # a training of one step keeps the shape
    assert read_timed("VShape(start=1, end=2, warmup=10%, total=100%)").schedule(1) == VShape(1.0, 2.0, 1, 2)
    assert read_timed("ByDepth(first=1, last=2)").schedule(200) == ByDepth(1.0, 2.0)


def test_a_switch_is_over_at_its_moment_and_a_ramp_stays_before_it():
    site = None
    switch = read_timed("1 -> 0.1 at 50%").schedule(10)
    assert [switch.value(step, site) for step in (0, 4, 5, 9)] == pytest.approx([1.0, 1.0, 0.1, 0.1])
    ramp = read_timed("0 -> 1 at 4 over 4").schedule(10)
    assert [ramp.value(step, site) for step in (0, 4, 6, 8, 9)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert read_timed("1 -> 0 at 0%").schedule(10).value(0, site) == 0.0


def test_methods_act_where_and_when_the_arm_says(task):
    model = task.model()
    arm = read_arm("DropHead(p=0 -> 0.5 at 50%) @ 1", task)
    handle = fit(arm, model, example=torch.zeros(2, 1, 4, 4), seed=0, steps=4)
    (fitted,) = handle.fitted
    assert fitted.site.depth == 1
    seen = []
    for _ in range(4):
        seen.append(float(fitted.states[0].value("p")))
        model(torch.zeros(2, 1, 4, 4)).sum().backward()
        handle.after_step()
    assert seen == [0.0, 0.0, 0.5, 0.5]
    handle.remove()
    assert fit(read_arm("baseline | epochs=3", task), model, example=None, seed=0, steps=4) is None


def test_layers_that_are_not_there_are_refused_with_those_that_are(task):
    model = task.model()
    for where, message in (
        ("5", r"'@ 5' asks for depth 5; attention layers have depths 0 to 1, counted from 0"),
        ("0-2", r"asks for depth 2"),
        (
            "block",
            r"'@ block' names no attention layer. Did you mean 'blocks'\? Layers: 1.blocks.0.attn, 1.blocks.1.attn",
        ),
        ("*.mlp", r"names no attention layer"),
    ):
        with pytest.raises(StudyError, match=message):
            fit(read_arm(f"DropHead() @ {where}", task), model, example=None, seed=0, steps=1)
        with pytest.raises(StudyError, match=rf"DropHead\(p=0.2\) @ .*{message}"):
            check_arms([read_arm(f"DropHead() @ {where}", task)], task)
    check_arms([read_arm(f"DropHead(p=0.2) @ {where}", task) for where in ("blocks", "*.0.attn", "0-1")], task)


def test_an_arm_that_changes_the_data_is_refused_and_one_that_changes_the_model_is_not():
    classes = load_task(f"{PLACE}:Resized")
    check_arms([read_arm(f"baseline | {change}", classes()) for change in ("dim=16", "epochs=9")], classes())
    with pytest.raises(StudyError, match=r"baseline \| pixels=8: its changes \(pixels\) give it other train examples"):
        check_arms([read_arm("baseline | pixels=8", classes())], classes())


def test_a_sweep_keeps_all_digits_of_its_values(task):
    axis, _ = read_sweep("NeuTRENO(strength={0.12345678901234567,0.12345678901234599,2})", task)
    # both differ after twelve digits
    assert axis.arms[0] == f"NeuTRENO(strength={0.12345678901234567!r})" and len(set(axis.arms)) == 3
    assert read_sweep("baseline | batch_size={2,4}", task)[0].arms == [
        "baseline | batch_size=2",
        "baseline | batch_size=4",
    ]


def test_a_sweep_is_an_axis_of_arms_in_the_order_of_its_values(task):
    axis, _ = read_sweep("NeuTRENO(strength={0.4, 0,.2}) @ 1 | epochs=2", task)
    assert axis.name == "strength" and axis.values == [0.0, 0.2, 0.4]
    assert axis.arms == [f"NeuTRENO(strength={value}) @ 1 | epochs=2" for value in axis.values]
    rates, _ = read_sweep("baseline | learning_rate={0.1,0.3}", task)
    assert rates.arms == ["baseline | learning_rate=0.1", "baseline | learning_rate=0.3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NeuTRENO(strength=0.1)", "needs one setting with values in braces, such as strength={0,0.1,0.2}"),
        ("NeuTRENO(strength={0,1}) | epochs={1,2}", "needs one setting with values in braces"),
        ("NeuTRENO(strength={0.1})", "needs at least two values, each once"),
        ("NeuTRENO(strength={0.1,0.1})", "needs at least two values, each once"),
        ("baseline | divergence_factor={2,inf}", "'inf' is not a finite number, so an axis cannot order it"),
        (
            "baseline | optimizer={sgd,adam}",
            "'sgd' is not a finite number, so an axis cannot order it. Give each as an arm: --method",
        ),
        ("DropHead(p={0,2})", "at p=2: DropHead: p must lie in"),
    ],
)
def test_a_mistake_in_a_sweep_is_named(text, message, task):
    with pytest.raises(StudyError, match=re.escape(message)):
        read_sweep(text, task)


def test_the_control_arm_has_the_examples_of_its_seed_and_draws_of_its_own():
    from headwise.lab.experiments.configuration import RunConfiguration

    common = {"study": "s", "task": "T", "settings": {}, "seed": 3}
    plain, same = RunConfiguration(arm="baseline", **common), RunConfiguration(arm=SAME, **common)
    assert plain.draws == 3 and same.draws != 3 and same.seed == 3
    assert RunConfiguration(arm=SAME, **common | {"seed": 4}).draws != same.draws


def test_a_model_without_attention_has_no_layers_to_name(task):
    with pytest.raises(StudyError, match="'@ 0': the model has no attention layer"):
        read_arm("DropHead() @ 0", task).where.check([])


@pytest.mark.parametrize("name", study_names())
def test_the_arms_of_a_built_in_study_are_written_in_their_one_form(name):
    study = getattr(load_study(name), "STUDY", None)
    # a study of findings has no arms in text
    if study is not None:
        assert study.arms == tuple(read_arm(arm, study.task).text for arm in study.arms)


def test_a_study_parses_its_arms_once_and_a_copy_with_other_texts_anew():
    study = load_study("digits").STUDY.model_copy(update={"methods": ("DropHead(p=0.10)",), "sweeps": ()})
    assert study.parsed is study.parsed and study.arms == ("baseline", "DropHead(p=0.1)")
    assert study.arm("DropHead(p=0.1)") is study.parsed["DropHead(p=0.1)"]
    other = study.model_copy(update={"sweeps": ("baseline | learning_rate={0.1,0.3}",)})
    assert other.arms == (*study.arms, *other.axes[0].arms) and len(study.arms) == 2
