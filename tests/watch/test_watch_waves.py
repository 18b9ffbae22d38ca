"""A loss that goes in waves says that neighbouring batches are alike; noise, spikes and a falling loss do not."""

import math
import random

import pytest
import torch

import headwise
from headwise.health.watching.losses import BEFORE, LOSS_WAVES, LossFigures, waves


def textbook(values):
    """The autocorrelation of neighbours about the least-squares parabola, times the spread, over the mean."""
    steps = torch.arange(len(values), dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    design = torch.stack([torch.ones_like(steps), steps, steps**2], 1)
    off = y - design @ torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    return float((off[1:] * off[:-1]).sum() / off.square().sum() * off.square().mean().sqrt() / y.mean())


def in_waves(count=50, period=10.0, size=0.5):
    draw = random.Random(1)
    return [2 - 0.002 * at + size * math.sin(2 * math.pi * at / period) + draw.gauss(0, 0.05) for at in range(count)]


@pytest.mark.parametrize(("period", "size"), [(10.0, 0.5), (6.0, 1.0), (15.0, 0.2)])
def test_waves_equal_their_definition(period, size):
    values = in_waves(period=period, size=size)
    assert waves(values) == pytest.approx(textbook(values), rel=1e-9) and waves(values) > 0.04


def test_noise_a_fall_a_spike_and_a_loss_below_zero_are_no_waves():
    draw = random.Random(0)
    noise = [2 + draw.gauss(0, 0.5) for _ in range(50)]
    assert waves(noise) == 0
    assert waves([4 * math.exp(-at / 20) + draw.gauss(0, 0.01) for at in range(50)]) == 0
    assert waves([2 + (8 * math.exp(-(at - 20) / 5) if at >= 20 else 0) for at in range(50)]) == 0
    assert waves([value - 9 for value in in_waves()]) == 0 == waves([2.0] * 50)


def test_a_loss_that_falls_fast_and_bends_is_no_wave():
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    learned_by_heart = (torch.exp(-0.05 * torch.arange(50)) * (1 + 0.15 * noise)).tolist()
    assert waves(learned_by_heart) == 0


def test_a_training_on_sorted_batches_is_named_within_fifty_steps_and_told_once():
    watch = headwise.watch(torch.nn.MultiheadAttention(8, 2), every=10_000, closer=None, on_alert=None)
    draw = random.Random(0)
    with pytest.warns(match="no training forward"):
        watch.step(2.0)
    for _ in range(80):
        watch.step(2 + draw.gauss(0, 0.05))
    for value in in_waves(60):
        watch.step(value)
    alerts = [alert for alert in watch.alerts() if alert["alert"] == "sorted_batches"]
    (alert,) = alerts
    assert 85 < alert["step"] < 131
    assert "neighbouring batches are alike, as if they were sorted by class" in alert["sentence"]
    assert "shuffle" in alert["remedy"] and alert["measured"].startswith("In tests: caught ")


def test_a_loss_that_is_not_finite_has_no_waves():
    figures = LossFigures()
    named = [record["statistic"] for value in [*in_waves(BEFORE), 2.0, math.nan] for record in figures.next(0, value)]
    assert named.count(LOSS_WAVES) == 1 and len(named) == 3
    assert all(record["statistic"] != LOSS_WAVES for record in LossFigures(with_waves=False).next(0, 1.0))
