"""One number is shown as one text, however its sum was computed."""

import math

import pytest

from headwise_verdict.pages.formats import unit_named


@pytest.mark.parametrize("value", [0.28865, 0.28864999999999996, 0.28865000000000007])
def test_a_tie_is_rounded_alike_whatever_the_error_of_its_sum(value):
    assert unit_named("%").number(value) == "28.87"
    assert unit_named("%").number(-value) == "−28.87"


def test_other_numbers_are_shown_as_before():
    assert unit_named("%").number(0.28864) == "28.86"
    assert unit_named("nats").number(1234.56784) == "1,234.5678"
    assert unit_named("nats").number(-0.00001, signed=True) == "0.0000"
    assert unit_named("nats").number(1e30) == f"{1e30:,.4f}"
    assert unit_named("nats").number(math.inf) == "inf"
    assert unit_named("nats").number(None) is None
