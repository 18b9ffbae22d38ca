"""Strengths chosen while training: the method's own schedules go on, resumed runs keep them, the report shows them."""

from __future__ import annotations

import json

import pytest
import torch
from small_models import Own

import headwise
from headwise import BranchDrop, ByDepth, DropHead, DropKey, NeuTRENO, Ramp, SoftCap, Temperature, VShape
from headwise.attend.core.method import REGISTRY
from headwise.attend.core.schedule import extremes
from headwise.attend.regularizing.training_state import Strengths


def fitted(*methods):
    torch.manual_seed(0)
    model = Own(depth=3)
    return model, headwise.regularize(model, *methods)


def strengths(handle, name):
    return [float(f.states[0].value(name)) for f in handle.fitted]


def test_a_chosen_number_keeps_the_schedule_over_depth():
    _, handle = fitted(DropKey(p=0.1, end_p=0.5))
    assert strengths(handle, "p") == pytest.approx([0.1, 0.3, 0.5])
    handle.set(DropKey, p=0.2)
    assert strengths(handle, "p") == pytest.approx([0.2, 0.35, 0.5])


def test_a_chosen_number_keeps_the_warm_up():
    model, handle = fitted(NeuTRENO(warmup_steps=10))
    handle.set(NeuTRENO, strength=0.3)
    assert strengths(handle, "strength") == [0.0, 0.0, 0.0]
    model(torch.randn(2, 5, 32))
    for _ in range(5):
        handle.after_step()
    assert strengths(handle, "strength")[1] == pytest.approx(0.15)


@pytest.mark.parametrize("chosen", [0.05, Ramp(0.0, 0.4, 20), ByDepth(0.3, 0.1), VShape(0.2, 0.1, 5, 20)])
def test_a_resumed_run_keeps_what_was_chosen(chosen):
    model, handle = fitted(DropHead(p=0.2))
    handle.set(DropHead, p=chosen)
    model(torch.randn(2, 5, 32))
    for _ in range(3):
        handle.after_step()
    state = json.loads(json.dumps(handle.state()))
    _, resumed = fitted(DropHead(p=0.2))
    resumed.load_state(state)
    assert strengths(resumed, "p") == strengths(handle, "p")


@pytest.mark.parametrize("missing", ["methods", "strengths"])
def test_states_without_methods_or_strengths_are_refused(missing):
    _, handle = fitted(DropHead(p=0.2))
    state = handle.state()
    del state[missing]
    with pytest.raises(ValueError, match=r"takes the result of state\(\) \(step, counters, methods, strengths\)"):
        handle.load_state(state)


def test_the_report_shows_what_was_chosen():
    _, handle = fitted(DropHead(p=0.2))
    handle.set(DropHead, p=0.05)
    assert "DropHead(p=0.2) (now p=0.05)" in str(handle.report())


def test_the_report_marks_the_layer_whose_values_are_carried_as_read():
    _, handle = fitted(NeuTRENO())
    assert [row.status for row in handle.report().rows] == ["read", "regularized", "regularized"]
    _, handle = fitted(NeuTRENO(), DropHead())
    first, second, _ = handle.report().rows
    assert first.status == "regularized" and "NeuTRENO" not in first.detail
    assert "NeuTRENO" in second.detail


def test_methods_add_up_to_a_list_that_parse_reads():
    both = DropHead(p=0.1) + NeuTRENO() + DropKey()
    assert repr(both) == "DropHead(p=0.1) + NeuTRENO(strength=0.6) + DropKey(p=0.1)"
    assert headwise.parse(repr(both)) == both == [DropHead(p=0.1), NeuTRENO(), DropKey()]
    assert DropHead(p=0) == DropHead(p=0.0) and repr(NeuTRENO(strength=1)) == "NeuTRENO(strength=1.0)"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("DropHead(p=0.1,p=0.2)", ValueError, "DropHead is given p twice"),
        ("InputNoise(per_head=None)", ValueError, "must be of type bool, got None"),
        ("DropHead(p={[]:1})", ValueError, "is not a number, text, True, False or None"),
        (5, TypeError, r"parse\(\) takes a text"),
    ],
)
def test_texts_that_say_nothing_clear_are_refused(text, kind, message):
    with pytest.raises(kind, match=message):
        headwise.parse(text)


def test_a_list_of_methods_and_a_number_for_where_are_explained():
    with pytest.raises(TypeError, match="put a star before the list"):
        headwise.regularize(Own(), [DropHead()])
    with pytest.raises(TypeError, match="where must be a function of a site or names of layers, got 5"):
        headwise.regularize(Own(), DropHead(), where=5)


def test_the_state_of_another_model_or_of_other_methods_is_refused_by_name_and_changes_nothing():
    _, handle = fitted(DropHead(p=0.2), NeuTRENO())
    handle.set(NeuTRENO, strength=0.1)
    state = handle.state()
    torch.manual_seed(0)
    deeper = headwise.regularize(Own(depth=5), DropHead(p=0.2), NeuTRENO())
    with pytest.raises(
        ValueError, match=r"a model with other regularized layers \(only here: blocks\.3\.attn, blocks\.4\.attn\)"
    ):
        deeper.load_state(state)
    for methods in ([DropHead(p=0.2)], [NeuTRENO(), DropHead(p=0.2)], [DropHead(p=0.2), DropKey()]):
        _, other = fitted(*methods)
        before = other.state()
        with pytest.raises(ValueError, match=r"changed 'strength' of method 2, NeuTRENO, and the methods here are "):
            other.load_state({**state, "step": 7})
        assert other.state() == before


@pytest.mark.parametrize("methods", [[DropHead()], [NeuTRENO(), DropHead()], [DropHead(), NeuTRENO(), DropKey()]])
def test_the_state_of_other_methods_is_refused_though_no_strength_was_set(methods):
    state = json.loads(json.dumps(fitted(DropHead(), NeuTRENO())[1].state()))
    _, other = fitted(*methods)
    with pytest.raises(
        ValueError, match=r"this state comes from DropHead \+ NeuTRENO, and the methods here are .*: regularize with"
    ):
        other.load_state({**state, "step": 7})
    assert other.step == 0


@pytest.mark.parametrize("state", [{}, {"step": 1}, None, {"counters": {}}])
def test_what_is_no_state_is_refused_by_name(state):
    _, handle = fitted(DropHead())
    with pytest.raises(ValueError, match=r"load_state\(\) takes the result of state\(\)"):
        handle.load_state(state)


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int64"])
def test_numbers_of_numpy_are_numbers(kind):
    np = pytest.importorskip("numpy")
    half = getattr(np, kind)(1 if kind == "int64" else 0.5)
    assert repr(NeuTRENO(strength=half)) == f"NeuTRENO(strength={float(half)})"
    _, handle = fitted(NeuTRENO(), DropHead())
    handle.set(NeuTRENO, strength=half)
    handle.set(DropHead, p=VShape(half / 2, half / 2, np.int64(5), np.int32(20)))
    assert strengths(handle, "strength")[1] == float(half)
    state = json.loads(json.dumps(handle.state()))
    assert [type(e.get("value", 0.0)) in (int, float) for e in state["strengths"]] == [True, True]
    handle.load_state(state)
    with pytest.raises(TypeError, match="must be a number"):
        DropHead(p=np.array([0.1, 0.2]))


def test_a_schedule_in_a_constructor_is_pointed_to_set():
    with pytest.raises(
        TypeError, match=r"DropHead\.p must be a number, got Ramp.*regularized\.set\(DropHead, p=\.\.\.\)"
    ):
        DropHead(p=Ramp(0.0, 0.4, 20))


@pytest.mark.parametrize(("method", "name"), [(Temperature(value=2.0), "value"), (SoftCap(cap=5.0), "cap")], ids=repr)
def test_a_schedule_that_passes_a_forbidden_value_on_its_way_is_refused(method, name):
    _, handle = fitted(method)
    before = strengths(handle, name)
    with pytest.raises(ValueError, match=rf"{name} must be positive and finite, got 0\.0, which VShape\(.* comes to"):
        handle.set(type(method), **{name: VShape(start=2.0, end=1.0, warmup=5, total=20)})
    assert strengths(handle, name) == before


def test_a_value_that_single_precision_rounds_to_a_forbidden_one_is_refused():
    _, handle = fitted(BranchDrop(p=0.1), Temperature(value=1.0))
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1\.0"):
        handle.set(BranchDrop, p=1 - 1e-9)
    with pytest.raises(ValueError, match=r"value must be positive and finite, got 0\.0"):
        handle.set(Temperature, value=Ramp(1.0, 1e-60, steps=10))


LIVE = [(cls, name) for cls in REGISTRY.values() if cls.__module__.startswith("headwise.") for name in cls.live]


@pytest.mark.parametrize("schedule", [VShape, Ramp, ByDepth])
@pytest.mark.parametrize(("cls", "name"), LIVE, ids=lambda x: getattr(x, "__name__", x))
def test_what_a_schedule_comes_to_is_allowed_over_all_of_it_or_it_is_refused(cls, name, schedule):
    method = cls(**cls.strong)
    strong = getattr(method, name)
    site = fitted(DropHead())[1].fitted[1].site
    for low in (strong, 0.0, -1.0, 1.0, 1e60, float("inf"), float("nan")):
        chosen = Strengths()
        settings = {VShape: (low, strong, 7, 20), Ramp: (strong, low, 20), ByDepth: (strong, low)}[schedule]
        try:
            made = schedule(*settings)
            chosen.set([method], cls, {name: made})
        except ValueError:
            continue
        for step in range(25):
            value = float(torch.tensor(chosen.at(method, name, step, site), dtype=torch.float32))
            assert abs(value) < float("inf")
            method.replace(**{name: value})
            assert min(extremes(made)) <= chosen.at(method, name, step, site) <= max(extremes(made))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_schedule_between_numbers_that_are_none_is_refused(bad):
    for make in (lambda: VShape(0.1, bad, 5, 20), lambda: Ramp(bad, 0.1, 5), lambda: ByDepth(0.1, bad)):
        with pytest.raises(ValueError, match=rf"needs finite numbers, got .*={bad}"):
            make()
