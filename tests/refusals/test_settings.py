"""Settings out of range, of the wrong kind or unknown: an error that shows the value and says what is allowed."""

import dataclasses
import math
import re

import pytest
import torch

import headwise
from headwise import DropHead, DropKey, VShape
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY, Method

# A name for a type, as a method's author may have one: only the type behind it says what a setting may hold.
Share = float
Count = int | None

CLASSES = [REGISTRY[name] for name in shelf.__all__]
FIELDS = [(cls, field) for cls in CLASSES for field in dataclasses.fields(cls)]
NUMBERS = [(cls, f) for cls, f in FIELDS if isinstance(f.default, (int, float)) and not isinstance(f.default, bool)]
TEXTS = [(cls, f) for cls, f in FIELDS if isinstance(f.default, str)]
BOOLS = [(cls, f) for cls, f in FIELDS if isinstance(f.default, bool)]


def names(pairs):
    return [f"{cls.__name__}.{field.name}" for cls, field in pairs]


# A logit may be any finite number.
LOGITS = {("AttentionSink", "logit"), ("ForgettingAttention", "bias")}
RANGED = [(cls, f) for cls, f in NUMBERS if (cls.__name__, f.name) not in LOGITS]


@pytest.mark.parametrize(("cls", "field"), RANGED, ids=names(RANGED))
def test_a_number_out_of_range_is_shown_with_what_is_allowed(cls, field):
    bad = -1 if "int" in str(field.type) else -0.5
    with pytest.raises(ValueError, match=rf"{cls.__name__}.*{field.name} .*must .*got {re.escape(str(bad))}"):
        cls(**{field.name: bad})


@pytest.mark.parametrize(("cls", "field"), NUMBERS, ids=names(NUMBERS))
def test_not_a_number_is_refused(cls, field):
    with pytest.raises(
        (ValueError, TypeError), match=rf"{cls.__name__}\.{field.name} must be a (whole )?number, got nan"
    ):
        cls(**{field.name: math.nan})
    with pytest.raises(TypeError, match=rf"{cls.__name__}\.{field.name} must be a number, got 'half'"):
        cls(**{field.name: "half"})
    with pytest.raises(TypeError, match=rf"{cls.__name__}\.{field.name} must be .*, got True"):
        cls(**{field.name: True})


@pytest.mark.parametrize(("cls", "field"), NUMBERS, ids=names(NUMBERS))
def test_infinity_is_refused_where_it_is_not_the_neutral_setting(cls, field):
    if (cls.neutral or {}).get(field.name) == math.inf:
        assert getattr(cls(**{field.name: math.inf}), field.name) == math.inf
        return
    with pytest.raises((ValueError, TypeError), match=rf"{cls.__name__}.*{field.name} .*got inf"):
        cls(**{field.name: math.inf})


@pytest.mark.parametrize(("cls", "field"), TEXTS, ids=names(TEXTS))
def test_an_unknown_choice_is_shown_with_those_there_are(cls, field):
    with pytest.raises(
        ValueError, match=rf"{cls.__name__}: {field.name} must be one of .*{field.default!r}.*, got 'diagonal'"
    ):
        cls(**{field.name: "diagonal"})


@pytest.mark.parametrize(("cls", "field"), BOOLS, ids=names(BOOLS))
def test_a_flag_is_true_or_false(cls, field):
    with pytest.raises(TypeError, match=rf"{cls.__name__}\.{field.name} must be of type bool, got 1"):
        cls(**{field.name: 1})


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_unknown_setting_is_refused(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__} has no setting 'strenght'.*Its settings: "):
        cls(strenght=1.0)
    with pytest.raises(ValueError, match=f"{cls.__name__} has no setting 'strenght'"):
        headwise.parse(f"{cls.__name__}(strenght=1.0)")


def test_a_setting_without_its_name_is_refused_with_the_name():
    with pytest.raises(TypeError, match=r"^DropHead takes its settings by name, such as p=0\.1$"):
        headwise.DropHead(0.1)
    with pytest.raises(TypeError, match=r"Its settings: p, rescale\.$"):
        headwise.DropHead(prob=0.1)


def test_a_text_in_the_place_of_a_method_is_refused_with_what_reads_it():
    layer = torch.nn.MultiheadAttention(8, 2)
    with pytest.raises(TypeError, match=r"got 'DropHead'; pass \*headwise\.parse\('DropHead'\)$"):
        headwise.regularize(layer, "DropHead")
    headwise.regularize(layer, *headwise.parse("DropHead"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DropHed(p=0.2)", r"There is no method 'DropHed'\. Did you mean 'DropHead'\?"),
        ("drophead", r"There is no method 'drophead'\. Did you mean 'DropHead'\?"),
        ("Zebra", r"There is no method 'Zebra'\. `headwise methods` lists them"),
        ("DropHead(0.2)", r"DropHead takes its settings by name, such as DropHead\(p=0\.2\); got 'DropHead\(0\.2\)'"),
        ("DropHead(p=1.2)", r"DropHead: p must lie in \[0, 1\), got 1\.2"),
        ("DropHead(p=big)", r"DropHead: 'big' is not a number, text, True, False or None"),
        ("DropHead(p=0.2", r"cannot read methods from 'DropHead\(p=0\.2'"),
        ("DropHead(p=0.2) - DropKey()", r"cannot read a method from"),
        ("", "cannot read methods from ''"),
        ("DropKey(unti='column')", r"DropKey has no setting 'unti'.? Did you mean 'unit'\?"),
    ],
)
def test_text_that_is_no_method_is_explained(text, message):
    with pytest.raises(ValueError, match=message):
        headwise.parse(text)


def test_a_method_of_a_method_is_refused():
    with pytest.raises(TypeError, match="Milder must derive from Method itself"):

        class Milder(DropHead):
            pass

    with pytest.raises(
        TypeError, match=r"a method named 'DropKey' exists already in headwise\.attend\.methods\.drop_key"
    ):
        type("DropKey", (Method,), {"__module__": __name__})
    assert REGISTRY["DropKey"] is DropKey


def test_a_schedule_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="VShape needs 0 < warmup < total, got warmup=9, total=5"):
        VShape(start=0.2, end=0.1, warmup=9, total=5)
    with pytest.raises(ValueError, match="Ramp needs steps >= 1, got 0"):
        headwise.Ramp(start=0.0, end=1.0, steps=0)


@pytest.fixture
def named_types():
    class Named(Method):
        """Has settings whose types have names of their own."""

        share: "Share" = 0.5
        count: "Count" = 3

    yield Named
    del REGISTRY["Named"]


def test_the_types_of_settings_are_read_and_not_their_text(named_types):
    assert repr(named_types(share=1)) == "Named(share=1.0)"
    assert named_types(count=None).count is None
    with pytest.raises(TypeError, match=r"Named\.count must be a whole number, got 2\.5"):
        named_types(count=2.5)
