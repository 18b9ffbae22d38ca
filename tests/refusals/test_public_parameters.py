"""Every parameter of every public callable refuses an object that it cannot take, in words of its own."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import pytest
import torch
from small_models import HOSTS, fresh

import headwise
from headwise import DropHead
from headwise.attend.regularizing.handle import PLUMBING

HOST = HOSTS["own"]
SOURCE = str(Path(headwise.__file__).parent)


class Wrong:
    """An object that no parameter takes."""

    def __repr__(self):
        return "WRONG"


def model():
    return fresh(HOST)


def loss():
    return HOST.run(model()).square().mean()


def groups(decay=0.0):
    return headwise.parameter_groups(model(), lr=1e-3, weight_decay=decay)


def attached(decay=0.0):
    known = groups(decay)
    return {"optimizer": torch.optim.AdamW(known), "groups": known}


# what else a call needs
VALID = {
    "alarms": lambda: {"source": "log.csv"},
    "audit": lambda: {"checkpoint": model()},
    "compress": lambda: {"model": model()},
    "importance": lambda: {"model": model(), "data": []},
    "judge": lambda: {"source": [0.1, 0.2]},
    "load_compressed": lambda: {"model": model(), "state": {}},
    "load_pretrained": lambda: {"model": model(), "folder": "."},
    "parameter_groups": lambda: {"model": model(), "lr": 1e-3, "weight_decay": 0.1},
    "parse": lambda: {"text": "DropHead"},
    "regularize": lambda: {"model": model(), "methods": (DropHead(),)},
    "sharpness": lambda: {"loss": loss, "parameters": list(model().parameters())},
    "Muon": lambda: {"groups": groups()},
    "Hyperball": lambda: attached(),
    "Stiefel": lambda: attached(),
    "AlphaDecay": lambda: attached(decay=0.1),
    "CautiousDecay": lambda: {"optimizer": attached(decay=0.1)["optimizer"]},
    "ByDepth": lambda: {"first": 0.1, "last": 0.2},
    "Ramp": lambda: {"start": 0.1, "end": 0.2, "steps": 3},
    "VShape": lambda: {"start": 0.1, "end": 0.2, "warmup": 2, "total": 5},
    "TensorBoard": lambda: {"folder": "."},
    "MLflowRun": lambda: {"client": None, "run_id": "a"},
    "handle.ablate": lambda: {"layer": 0, "head": 0},
    "handle.set": lambda: {"method": DropHead},
    "handle.load_state": lambda: {"state": {}},
    "watch.keep": lambda: {"last": 1, "folder": "."},
    "watch.step_to": lambda: {"step": 1},
    "run.log": lambda: {"step": 1},
    "run.evaluated": lambda: {"split": "test", "figures": {}},
    "run.record": lambda: {"accuracy": 0.5},
    "run.regularize": lambda: {"model": model()},
}
VALID |= {name: lambda: {"model": model()} for name in ("watch", "sites", "handle")}
# Made by the library alone, or documented classes to derive from.
NOT_CALLED = {"Method", "Regularized", "Run", "Site"}
# Of batches and clients any class may be right; a batch that does not fit is the model's own error.
ANYTHING = {"example", "batch", "client"}
# The hub's client checks these itself; export() refuses this model first.
ELSEWHERE = {"handle.push_to_hub", "handle.export"}


def objects():
    handle = headwise.regularize(model(), DropHead(), example=HOST.example())
    return {"handle": handle, "watch": headwise.watch(model()), "run": headwise.run()}


def callables():
    for name in headwise.__all__:
        one = getattr(headwise, name)
        if callable(one) and name not in NOT_CALLED:
            yield name, lambda one=one: one
    for owner, instance in objects().items():
        for name, _ in inspect.getmembers(instance, inspect.ismethod):
            hidden = name.startswith("_") or (owner == "handle" and name in PLUMBING) or f"{owner}.{name}" in ELSEWHERE
            if not hidden:
                yield f"{owner}.{name}", lambda owner=owner, name=name: getattr(objects()[owner], name)


def cases():
    for name, get in callables():
        for parameter in inspect.signature(get()).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in ANYTHING:
                yield pytest.param(name, get, parameter, id=f"{name}({parameter.name})")


CASES = list(cases())


def test_the_walk_covers_the_public_names():
    walked = {case.values[0] for case in CASES}
    assert {"audit", "regularize", "watch", "Ramp", "DropHead", "handle.remove", "run.record", "watch.step"} <= walked
    assert len(CASES) > 150


@pytest.mark.parametrize(("name", "get", "parameter"), CASES)
def test_a_wrong_object_is_refused_where_it_enters(name, get, parameter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, arguments = get(), VALID.get(name, dict)()
    several = arguments.pop(parameter.name, ()) if parameter.kind is parameter.VAR_POSITIONAL else ()
    methods = arguments.pop("methods", several)
    if parameter.kind is parameter.VAR_POSITIONAL:
        given, arguments = [*arguments.values(), *methods, Wrong()], {}
    elif methods:
        given, arguments = [arguments.pop("model"), *methods], arguments | {parameter.name: Wrong()}
        if parameter.name == "model":
            given[0] = arguments.pop("model")
    else:
        given, arguments = [], arguments | {parameter.name: Wrong()}
    with torch.random.fork_rng(devices=[]), pytest.raises((TypeError, ValueError)) as told:
        function(*given, **arguments)
    frames = traceback.extract_tb(told.tb)
    assert frames[-1].filename.startswith(SOURCE) and "raise" in frames[-1].line, told.value
    text = str(told.value)
    assert any(word in text for word in (parameter.name, "WRONG", "Wrong", f"{name}()")), text
