"""The strength that each schedule gives at each step, and at each depth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headwise import ByDepth, Ramp, VShape

SITE = SimpleNamespace(relative_depth=0.25)


@pytest.mark.parametrize(
    ("schedule", "strengths"),
    [
        (VShape(start=0.2, end=0.1, warmup=5, total=25), {0: 0.2, 1: 0.16, 5: 0.0, 10: 0.025, 25: 0.1, 99: 0.1}),
        (Ramp(start=0.1, end=0.5, steps=20, begin=10), {0: 0.1, 10: 0.1, 15: 0.2, 30: 0.5, 99: 0.5}),
        (ByDepth(0.3, 0.1), {0: 0.25, 99: 0.25}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_schedule_has_its_strength_at_every_step(schedule, strengths):
    assert {step: schedule.value(step, SITE) for step in strengths} == pytest.approx(strengths)
