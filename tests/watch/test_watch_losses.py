"""The loss of every step is judged where it is given: at once, once, and by no reading's leave."""

import json
import math
import statistics
import warnings

import pytest
import torch
from small_models import HOSTS, fresh

import headwise
from headwise.health.watching.alerts import HealthAlert
from headwise.health.watching.losses import Losses, Spikes


def noisy(many, spikes=()):
    """Return losses that fall with noise, and at some steps lie far above."""
    noise = torch.randn(many, generator=torch.Generator().manual_seed(3)).clamp(-2, 2)
    falling = 3 - 0.01 * torch.arange(many) + 0.02 * noise
    for step, height in spikes:
        falling[step] += height
    return falling.tolist()


def stepped(losses, every=1000, as_tensor=False, **settings):
    watch = headwise.watch(fresh(HOSTS["own"]), **{"every": every, "on_alert": None, **settings})
    with warnings.catch_warnings():
        # no forward is run here, which the watch says
        warnings.simplefilter("ignore", headwise.health.watching.alerts.HealthWarning)
        for loss in losses:
            watch.step(torch.tensor(loss) if as_tensor else loss)
    return watch


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_spike_of_the_loss_is_told_at_its_step_between_two_readings(as_tensor):
    watch = stepped(noisy(90, [(70, 2.0)]), as_tensor=as_tensor)
    (alert,) = watch.alerts()
    assert (alert["alert"], alert["step"], alert["site"], alert["head"]) == ("loss_spike", 70, "model", None)
    exact = Spikes(50, 50).add(noisy(90, [(70, 2.0)]))[70]
    assert alert["value"] == pytest.approx(exact, rel=1e-4) and alert["threshold"] == 4.3
    assert alert["sentence"] == (f"the loss rose to {exact:.3g} standard deviations above the 50 steps before")
    assert "docs/results/alarms" in alert["remedy"] and "docs/results/stability-map" in alert["remedy"]


def test_nothing_is_said_before_fifty_losses_and_twice_only_of_two_spikes():
    losses = noisy(140, [(30, 2.0), (90, 2.0), (91, 2.0), (130, 9.0)])
    losses[30] = losses[29]
    assert [one["step"] for one in stepped(losses).alerts()] == [90, 130]
    assert not stepped(noisy(50)[:49] + [9.0]).alerts()


def test_one_batch_of_hard_examples_is_no_spike_and_two_in_a_row_or_a_great_one_are():
    for heights, step in (((1.0,), None), ((1.0, 0.8), 71), ((0.8, 1.0), 71), ((1.0, 0.0, 1.0), None), ((2.0,), 70)):
        losses = noisy(90, [(70 + at, height) for at, height in enumerate(heights)])
        deviation = Spikes(50, 50).add(losses)[70:73]
        assert max(deviation) > 4.3
        alerts = stepped(losses).alerts()
        assert [one["step"] for one in alerts] == ([] if step is None else [step])
        assert not alerts or alerts[0]["value"] == pytest.approx(max(deviation), rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_heavy_tail_of_a_loss_of_two_classes_is_no_alert(seed):
    draw = torch.Generator().manual_seed(seed)
    # of 16 examples few are confidently wrong
    logits = 3 + 2 * torch.randn(1200, 16, generator=draw)
    losses = torch.nn.functional.softplus(-logits).mean(1).tolist()
    deviations = Spikes.of_losses().add(losses)
    assert any(one is not None and one > 4.3 for one in deviations)
    # nor are they waves, although they are spread as widely as their mean
    assert not stepped(losses, every=100_000).alerts()


def test_a_limit_of_none_says_nothing_and_a_higher_one_less():
    losses = noisy(90, [(70, 2.0)])
    assert not stepped(losses, thresholds=headwise.Thresholds(loss_spike=None)).alerts()
    assert not stepped(losses, thresholds=headwise.Thresholds(loss_spike=1e4)).alerts()


def test_a_loss_that_is_not_finite_is_told_at_once_and_once():
    watch = stepped([2.0, 1.9, math.nan, math.nan, 1.8])
    assert [(one["alert"], one["step"]) for one in watch.alerts()] == [("not_finite", 2)]


def test_raise_stops_at_the_step_of_the_spike(tmp_path):
    losses = noisy(90, [(70, 2.0)])
    log = headwise.JsonLines(tmp_path / "health.jsonl")
    watch = headwise.watch(fresh(HOSTS["own"]), every=1000, on_alert="raise", log=log)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", headwise.health.watching.alerts.HealthWarning)
        for loss in losses[:70]:
            watch.step(loss)
        with pytest.raises(HealthAlert, match="the loss rose to"):
            watch.step(losses[70])
    figure, alert = map(json.loads, (tmp_path / "health.jsonl").read_text().splitlines())
    assert figure["statistic"] == "loss_spike" and figure["value"] == alert["value"] and alert["alert"] == "loss_spike"


def test_a_named_figure_raises_no_second_alert_at_its_reading():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=20, closer=None, on_alert=None, statistics=["loss_spike"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", headwise.health.watching.alerts.HealthWarning)
        for loss in noisy(90, [(70, 2.0)]):
            watch.step(loss)
    assert [one["step"] for one in watch.alerts()] == [70]
    found = {r["step"]: r["value"] for r in watch.records()}
    assert set(found) == {60, 80} and found[80] == watch.alerts()[0]["value"]


def test_more_than_one_number_is_refused():
    watch = headwise.watch(fresh(HOSTS["own"]), every=10, on_alert=None)
    with pytest.raises(ValueError, match=r"takes one number, got a tensor of shape \(2,\)"):
        watch.step(torch.ones(2))
    assert watch.steps == 0


def test_a_loss_that_is_written_over_is_the_one_that_was_given():
    losses, loss = Losses(), torch.zeros(())
    for step, value in enumerate(noisy(60)):
        losses.add(step, loss.fill_(value))
    found = [one for one in losses.known(wait=False) if one["statistic"] == "loss_spike"]
    assert [one["value"] for one in found] == pytest.approx(Spikes(50, 50).add(noisy(60))[50:], rel=1e-3)


class Event:
    """Stands for an event of CUDA that has not come before `done`."""

    done = False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


def test_a_loss_on_its_way_is_waited_for_at_a_reading_alone():
    losses, values = Losses(with_waves=False), noisy(60)
    for step, value in enumerate(values):
        losses.add(step, value)
    event = Event()
    losses._coming[55] = (55, torch.tensor(values[55]), event)
    assert [one["step"] for one in losses.known(wait=False)] == [*range(50, 55)]
    assert losses.known(wait=False) == []
    assert [one["step"] for one in losses.known(wait=True)] == [*range(55, 60)] and event.done


def arguments(folder, **settings):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False, **settings,
    )  # fmt: skip


def test_the_trainer_gives_the_loss_of_every_step_unasked(tmp_path):
    from transformers import Trainer, TrainerCallback

    class Logged(TrainerCallback):
        losses = []

        def on_log(self, args, state, control, logs=None, **others):
            if "loss" in logs:
                self.losses.append(logs["loss"])

    model, logged, taken = fresh(HOSTS["llama"]), Logged(), []
    data = [{"input_ids": torch.arange(9) + i, "labels": torch.arange(9) + i} for i in range(16)]
    callback = headwise.WatchCallback(every=50, on_alert=None)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2, logging_steps=1),
        train_dataset=data,
        callbacks=[callback, logged],
    )
    add = Losses.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Losses, "add", lambda self, step, loss: (taken.append(float(loss)), add(self, step, loss)))
        trainer.train()
    assert taken == pytest.approx(logged.losses, rel=1e-3) and len(taken) == 4
    assert "training_step" not in vars(trainer)


def test_a_trainers_own_training_step_comes_back(tmp_path):
    from transformers import Trainer

    calls = []
    data = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 4
    callback = headwise.WatchCallback(every=50, on_alert=None)
    trainer = Trainer(
        model=fresh(HOSTS["llama"]),
        args=arguments(tmp_path, max_steps=2, logging_strategy="no"),
        train_dataset=data,
        callbacks=[callback],
    )
    step = trainer.training_step
    trainer.training_step = own = lambda *args, **settings: (calls.append(1), step(*args, **settings))[1]
    trainer.train()
    assert trainer.training_step is own and len(calls) == 2


def test_a_deviation_is_in_sample_standard_deviations_and_has_a_sign():
    before = [1.0, 2.0, 4.0, 3.0]
    values = Spikes(4, 4).add([*before, 0.5])
    assert values[:4] == [None] * 4
    assert values[4] == pytest.approx((0.5 - statistics.fmean(before)) / statistics.stdev(before))
    assert values[4] < 0
