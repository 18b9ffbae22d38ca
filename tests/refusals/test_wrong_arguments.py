"""Wrong arguments of public functions are refused where they enter, by name, and leave the model as it is."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import HOSTS, fresh

import headwise
from headwise import DropHead

NAN = math.nan

# the call, and words of its error
WRONG = {
    "headwise.regularize(model, DropHead(), seed='a')": "seed must be a whole number, got 'a'",
    "headwise.regularize(model, DropHead(), seed=1.5)": "seed must be a whole number, got 1.5",
    "headwise.regularize(model, DropHead(), seed=None)": "seed must be a whole number, got None",
    "headwise.regularize(model, DropHead(), seed=True)": "seed must be a whole number, got True",
    "headwise.regularize(model, DropHead(), where=5)": "where",
    "headwise.regularize(model, DropHead(), attention='x')": "attention",
    "headwise.regularize(model, allow_none='no')": "allow_none must be True or False, got 'no'",
    "headwise.regularize(model, 'DropHead')": "DropHead",
    "headwise.regularize(model, None)": "None",
    "headwise.regularize(None, DropHead())": "None",
    "headwise.parameter_groups(model, lr=NAN, weight_decay=0.1)": "lr must be finite, got nan",
    "headwise.parameter_groups(model, lr=-1.0, weight_decay=0.1)": "lr must be at least 0, got -1",
    "headwise.parameter_groups(model, lr='a', weight_decay=0.1)": "lr must be a number, got 'a'",
    "headwise.parameter_groups(model, lr=True, weight_decay=0.1)": "lr must be a number, got True",
    "headwise.parameter_groups(model, 1e-3, NAN)": "weight_decay",
    "headwise.parameter_groups(model, 1e-3, None)": "weight_decay must be a number, got None",
    "headwise.parameter_groups(model, 1e-3, 0.1, 'x')": "attention_weight_decay must be a number, got 'x'",
    "headwise.parameter_groups(model, 1e-3, 0.1, math.inf)": "attention_weight_decay",
    "headwise.parameter_groups(model, 1e-3, 0.1, mlp_weight_decay=NAN)": "mlp_weight_decay",
    "headwise.parameter_groups(None, 1e-3, 0.1)": "model must be a torch module, got None",
    "headwise.watch(model, every=1.5)": "every must be a whole number of steps, got 1.5",
    "headwise.watch(model, every=True)": "every must be a whole number of steps, got True",
    "headwise.watch(model, every=0)": "every must be at least 1",
    "headwise.watch(model, rows=2.5)": "rows must be a whole number of queries or None, got 2.5",
    "headwise.watch(model, keep=1.5)": "keep must be a whole number of steps or None, got 1.5",
    "headwise.watch(model, thresholds={})": r"thresholds must be headwise.Thresholds\(...\) or None, got {}",
    "headwise.watch(model, statistics=[5])": "statistics must be a list of names, got 5 in it",
    "headwise.watch(model, loss=5)": "loss must be a function",
    "headwise.watch(model, log_heads='x')": "log_heads must be True or False, got 'x'",
    "headwise.watch(None)": "model must be a torch module, got None",
    "headwise.audit(None)": "checkpoint must be a torch module, .*, got None",
    "headwise.audit(5)": "checkpoint must be a torch module, .*, got 5",
    "headwise.audit(model, thresholds={})": "thresholds must be",
    "headwise.audit(model, activation_thresholds={})": "activation_thresholds must be",
    "headwise.audit(model, text=5)": "text must be a path or None, got 5",
    "headwise.audit(model, out=5)": "out must be a path or None, got 5",
    "headwise.load_pretrained(None, '.')": "model must be a torch module, got None",
    "headwise.load_pretrained(model, None)": "folder must be a path, got None",
    "headwise.load_compressed(model, None)": "state must be a state dict, got None",
    "headwise.load_compressed(None, {})": "model must be a torch module, got None",
    "headwise.compress(model, energy=NAN)": "energy",
    "headwise.compress(model, energy='a')": "energy",
    "headwise.sites(None)": "model must be a torch module, got None",
    "headwise.handle(None)": "None",
    "headwise.parse(None)": "None",
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_is_named_where_it_enters(call):
    model = fresh(HOSTS["own"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((TypeError, ValueError), match=WRONG[call]):
        eval(call, {"headwise": headwise, "DropHead": DropHead, "math": math, "NAN": NAN, "model": model})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="not regularized"):
        headwise.handle(model)


@pytest.mark.parametrize("subject", [None, 5, 1.5, True, [], {}])
def test_compare_names_what_it_takes(subject):
    pytest.importorskip("pydantic")
    with pytest.raises(TypeError, match=r"compare\(\) takes a task, a study or the command of a training script"):
        headwise.compare(subject)


@pytest.mark.parametrize("step", [-5, 1.5, "3", None, True, 2**70])
def test_a_state_with_a_wrong_step_is_refused_and_changes_nothing(step):
    handle = headwise.regularize(fresh(HOSTS["own"]), DropHead(p=0.1))
    before = handle.state()
    with pytest.raises(ValueError, match=r"load_state\(\) takes the result of state\(\)"):
        handle.load_state({**before, "step": step})
    assert handle.state() == before


def test_callbacks_check_when_they_are_made():
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match=r"every must be a whole number of steps, got 1\.5"):
        headwise.WatchCallback(every=1.5)
    with pytest.raises(TypeError, match="seed must be a whole number"):
        headwise.HeadwiseCallback(seed="a")
    with pytest.raises(TypeError, match="each of methods must be a method"):
        headwise.HeadwiseCallback("DropHead")
