"""Checks of a method class and its settings: its declarations, its text, its copies."""

from __future__ import annotations

import copy
import difflib
import pickle
import typing

from headwise.core.method import STAGES, TWINS, Method
from headwise.methods.text import parse
from headwise.testing.calls import run, why_not

EVERY_STAGE = {*STAGES, *(twin for twins in TWINS.values() for twin in twins), "unbuild", "fold", "ahead"}


def made(cls: type[Method]) -> list[Method]:
    """Return the method at its default, strong and neutral settings."""
    return [cls(), cls(**cls.strong), *([] if cls.neutral is None else [cls(**cls.neutral)])]


def declarations(cls: type[Method]) -> None:
    """Check that the declarations of the class are valid and agree with a call."""
    _check_texts(cls)
    _check_stages(cls)
    fields = [*cls().settings()]
    unknown = [name for name in cls.live if name not in fields]
    assert not unknown, f"live names {unknown}, which are not fields; its fields: {fields}"
    method = cls(**cls.strong)
    if why_not(method, "plain") is not None:
        return
    ran = run([method], "plain", "textbook")
    stateful = method.draws() or method.penalizes or method.carries or method.counts_batches()
    assert not ran.passes or stateful, "it draws random numbers: set random = True"
    assert method.penalizes or not float(ran.penalty), "it adds to the loss: set penalizes = True"


def _check_texts(cls: type[Method]) -> None:
    summary = cls.summary()
    # A dataclass without a docstring gets its signature as docstring.
    assert summary and not summary.startswith(f"{cls.__name__}("), (
        "it has no docstring: begin with one sentence that states the operation"
    )
    assert cls.neutral is not None or cls.no_neutral, (
        "it has neither `neutral` nor `no_neutral`, which says why there is none"
    )
    for name in ("acts", "over_layers", "cost"):
        (hint,) = typing.get_args(typing.get_type_hints(Method)[name])
        allowed = typing.get_args(hint)
        assert getattr(cls, name) in allowed, f"{name} is {getattr(cls, name)!r}, which is not one of {allowed}"


def _check_stages(cls: type[Method]) -> None:
    for name in ("scores", "keep", "attend"):
        textbook = [stage for stage, twins in TWINS.items() if name in twins]
        called = any(cls.overrides(stage) for stage in textbook)
        assert called or not callable(vars(cls).get(name)), (
            f"{name} is never called: it is the fast form of {' or '.join(textbook)}"
        )
    own = [name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]
    for name in own:
        near = difflib.get_close_matches(name, EVERY_STAGE, n=1, cutoff=0.8)
        assert name in EVERY_STAGE or hasattr(Method, name) or not near, (
            f"{name} is not a stage; did you mean {near[0]}?"
        )


def text(cls: type[Method]) -> None:
    """Check that `parse` reads what `repr` writes."""
    for method in made(cls):
        read = parse(repr(method))
        assert read == [method], f"parse({method!r}) gives {read!r}"


def copies(cls: type[Method]) -> None:
    """Check that settings survive deepcopy and pickle, and that an instance holds only settings."""
    for method in made(cls):
        assert copy.deepcopy(method) == method, f"deepcopy of {method!r} is {copy.deepcopy(method)!r}"
        extra = vars(method).keys() - method.settings().keys()
        assert not extra, f"an instance holds {sorted(extra)} beside its settings: keep it with call.state(self)"
        try:
            again = pickle.loads(pickle.dumps(method))
        except (pickle.PicklingError, AttributeError) as error:
            raise AssertionError(f"it cannot be pickled ({error}): define the class at the top of a module") from error
        assert again == method, f"pickle gives {again!r} for {method!r}"
