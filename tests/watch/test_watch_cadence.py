"""Full readings now and then, closer ones after a cheap signal has moved, within bounds, told, without a change."""

import pytest
import torch
from small_models import HOSTS, fresh
from watched_model import VECTORS, watched

import headwise
from headwise.health.watching import losses
from headwise.health.watching import watch as watch_module
from headwise.health.watching.cadence import Cadence


def steps_read(watch):
    return sorted({record["step"] for record in watch.records()})


def test_a_stretch_of_closer_readings_has_an_end_and_is_followed_by_a_rest():
    cadence = Cadence(20, 5)
    read = []
    for step in range(100):
        if cadence.due(step):
            read.append(step)
        # what moves at each step from 7 on
        if step >= 7:
            cadence.moved(step, "the loss moved")
    assert read == [0, 10, 15, 20, 25, 40, 50, 55, 60, 65, 80, 90, 95]
    assert [(one.first, one.last) for one in cadence.stretches] == [(8, 27), (48, 67), (88, 107)]
    assert str(cadence.stretches[0]) == "Read every 5 steps from step 8 to 27, because the loss moved."


@pytest.mark.parametrize("closer", [None, 20, 50])
def test_no_reading_is_closer_without_a_smaller_distance(closer):
    cadence = Cadence(20, closer)
    cadence.moved(3, "the loss moved")
    assert [step for step in range(61) if cadence.due(step)] == [0, 20, 40, 60] and not cadence.stretches


def trained(every, jump=0.0, **settings):
    """Train a model whose loss or gradient norm jumps at step 62, and return its watch and weights."""
    model = fresh(HOSTS["own"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = headwise.watch(model, every=every, on_alert=None, statistics=["max_logit"], **settings)
    for step in range(80):
        loss = model(VECTORS).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told = 1 + 0.01 * (step % 3) + (jump if step == 62 else 0)
        watch.step(told) if jump >= 0 else watch.step(1.0, gradient_norm=torch.tensor(2 - told))
    return watch, [p.detach().clone() for p in model.parameters()]


def test_a_loss_that_moves_is_read_closer_and_the_report_says_why():
    watch, _ = trained(40, jump=0.02, closer=4)
    assert watch.alerts() == []
    assert steps_read(watch) == [0, 40, 64, 68, 72, 76]
    assert "Read every 4 steps from step 63 to 102, because the loss rose by " in str(watch.report())


def test_a_gradient_norm_that_moves_is_read_closer_too():
    watch, _ = trained(40, jump=-5.0, closer=4)
    assert steps_read(watch) == [0, 40, 64, 68, 72, 76]
    assert "because the gradient norm rose by " in str(watch.report())


def test_closer_readings_change_no_bit_of_the_training():
    closer, with_closer = trained(40, jump=0.02, closer=2)
    rare, with_rare = trained(40, jump=0.02, closer=None)
    assert len(steps_read(closer)) > len(steps_read(rare)) == 2
    assert all(torch.equal(a, b) for a, b in zip(with_closer, with_rare, strict=True))


def test_a_logit_at_half_its_limit_is_read_closer():
    model, watch = watched(every=10, closer=5, thresholds=headwise.Thresholds(max_logit=1e9))
    model(VECTORS)
    watch.step()
    largest = max(record["value"] for record in watch.records() if record["statistic"] == "max_logit")
    for limit, read in ((1.9 * largest, [0, 5, 10]), (2.1 * largest, [0, 10])):
        model, watch = watched(every=10, closer=5, thresholds=headwise.Thresholds(max_logit=limit))
        for _ in range(11):
            model(VECTORS)
            watch.step()
        assert steps_read(watch) == read


def test_no_step_waits_for_a_gradient_norm(monkeypatch):
    monkeypatch.setattr(losses, "_arrived", lambda *_: False)
    watch, _ = trained(40, jump=-5.0, closer=4)
    assert steps_read(watch) == [0, 40]
    # those up to step 40 were waited for at its reading, so that they do not pile up
    assert len(watch._gradients._coming) == 39


def test_with_several_processes_a_loss_makes_no_reading_closer(monkeypatch):
    monkeypatch.setattr(watch_module, "ranks", lambda: 2)
    watch, _ = trained(40, jump=0.02, closer=4)
    assert steps_read(watch) == [0, 40]


def test_a_resumed_run_begins_without_a_stretch():
    watch, _ = trained(40, jump=0.02, closer=4)
    watch.step_to(100)
    assert not watch._armed


@pytest.mark.parametrize("closer", [0, -3])
def test_a_distance_of_nothing_is_refused(closer):
    with pytest.raises(ValueError, match=f"closer is the number of steps .* got {closer}"):
        headwise.watch(torch.nn.MultiheadAttention(8, 2), closer=closer)
