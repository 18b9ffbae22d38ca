"""Alerts are told as one diagnosis: what began, where, since when, what to do, and what has followed."""

import warnings

import pytest
import torch
from watched_model import figure, read, sharpen, watched

import headwise
from headwise.health.watching.alerts import HealthWarning, Judge
from headwise.health.watching.diagnosis import Diagnosis, Incidents, told
from headwise.health.watching.logs import Metrics
from headwise.health.watching.rules import OF_STEPS, Thresholds


def alerts_of(*readings):
    """Return the alerts of readings, each a step with the logits of heads and their entropies."""
    judge = Judge(Thresholds())
    found = []
    for step, logits, shares in readings:
        figures = [figure("max_logit", value, step, head) for head, value in enumerate(logits)]
        figures += [figure("entropy_share", value, step, head) for head, value in enumerate(shares)]
        found.append(judge.alerts(figures))
    return found


HEALTHY, LATER, WORSE = (40, (9, 9, 9), (0.5,) * 3), (45, (112, 130, 140), (0.5,) * 3), (55, (300,) * 3, (0.01,) * 3)


def test_what_began_is_told_with_its_place_its_start_and_its_remedy():
    _, first = alerts_of(HEALTHY, LATER)
    (text,) = Incidents().add(first).values()
    lines = text.splitlines()
    assert lines[0] == (
        "Step 45 (healthy at step 40): the largest logit of blocks.3.attn head 0 passed 100 (now 112) within 5 steps, "
        "here and in two other heads"
    )
    assert lines[1].startswith("  what to do: QKNorm, QKClip") and "2507.20534" in lines[1]
    assert lines[2].startswith("  In tests: caught ") and len(lines) == 3


def test_what_follows_is_one_line_and_what_spreads_is_none():
    incidents = Incidents()
    _, first, second = alerts_of(HEALTHY, LATER, WORSE)
    incidents.add(first)
    assert incidents.add(second) == {
        "entropy_collapse": "entropy collapse in 3 heads of 1 layer from step 55 has followed the logit growth of "
        "step 45"
    }
    judge = Judge(Thresholds())
    more = judge.alerts([figure("max_logit", 400.0, 60, head=7, site="blocks.9.attn")])
    assert len(more) == 1 and incidents.add(more) == {}
    (incident,) = incidents.all
    assert len(incident.alerts) == 7
    assert str(incident).splitlines()[-1] == "  has followed: entropy collapse in 3 heads of 1 layer from step 55"
    assert "here and in three other heads" in str(incident)


def test_of_one_reading_the_cause_began_and_not_what_it_leads_to():
    judge = Judge(Thresholds())
    judge.alerts([figure("entropy_share", 0.5, 0), figure("max_logit", 9.0, 0)])
    both = judge.alerts([figure("entropy_share", 0.01, 5), figure("max_logit", 200.0, 5)])
    assert [alert["alert"] for alert in both] == ["entropy_collapse", "logit_growth"]
    news = Incidents().add(both)
    assert list(news) == ["logit_growth", "entropy_collapse"]
    assert told(news).splitlines()[-1] == "  with it: entropy collapse in 1 head of 1 layer from step 5"


def test_trouble_long_after_is_another_incident():
    def spike(step):
        return Judge(Thresholds(), rules=OF_STEPS).alerts([figure("loss_spike", 12.0, step, None, "model")])

    for every, apart, groups in ((1, 50, 1), (1, 51, 2), (100, 200, 1), (100, 201, 2)):
        incidents = Incidents(every)
        incidents.add(spike(10))
        again = incidents.add(spike(10 + apart))
        assert len(incidents.all) == groups and len(again) == groups - 1


def test_a_run_of_many_alerts_is_told_once_and_listed_on_request():
    model, watch = watched(on_alert="warn", statistics=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(model, watch)
        for _ in range(4):
            sharpen(model, 12)
            read(model, watch)
    texts = [str(one.message) for one in caught if one.category is HealthWarning]
    kinds = {alert["alert"] for alert in watch.alerts()}
    assert len(watch.alerts()) > 8 > len(kinds) and 1 <= len(texts) <= len(kinds)
    report = watch.report()
    assert isinstance(report, Diagnosis) and len(report.incidents) == 1
    assert str(report).startswith(f"{len(watch.alerts())} alerts: 5 readings in 5 steps.\nStep ")
    assert f"logit growth in {report.now['logit_growth']}" in str(report)
    assert len(str(report).splitlines()) < 8
    listed = str(watch.report(details=True))
    assert all(f"  step {alert['step']}: {alert['sentence']}" in listed for alert in watch.alerts())


def test_a_loss_that_spikes_names_no_head_and_recovers():
    watch = headwise.watch(torch.nn.MultiheadAttention(8, 2), every=10_000, closer=None, on_alert=None)
    with pytest.warns(match="no training forward"):
        watch.step(1.0)
    for step in range(60):
        watch.step(9.0 if step == 55 else 1 + 0.01 * (step % 3))
    text = str(watch.report())
    assert "the loss rose to" in text and "here and" not in text
    assert "Beyond a limit now: nothing; all have recovered." in text


def test_a_healthy_run_says_so():
    model, watch = watched()
    assert str(watch.report()) == "No step was read: call watch.step(loss) after each optimizer step."
    read(model, watch)
    assert str(watch.report()) == repr(watch.report()) == "No alerts: 1 reading in 1 step."
    with pytest.raises(TypeError, match="details"):
        watch.report(details="all")


def test_loggers_get_a_text_for_each_kind_and_not_for_each_reading():
    seen = []

    class Log:
        def log(self, values, step):
            seen.extend((step, name) for name in values if "/alert/" in name)

    log = Metrics(Log())
    _, first, second = alerts_of(HEALTHY, LATER, WORSE)
    again = Judge(Thresholds()).alerts([figure("max_logit", 400.0, 60, head=7)])
    for alerts in (first, second, again):
        log.write(alerts, alerts[0]["step"])
    assert seen == [(45, "health/alert/logit_growth"), (55, "health/alert/entropy_collapse")]


def test_a_logger_groups_what_the_report_groups_at_any_cadence():
    seen = []

    class Log:
        def log(self, values, step):
            seen.extend(text for name, text in values.items() if "/alert/" in name)

    log = Metrics(Log())
    _, watch = watched(every=100, closer=None, log=log, statistics=["max_logit"])
    for step in (100, 200):
        # readings of a run whose heads and loss go wrong one reading after the other
        log.write(Judge(Thresholds()).alerts([figure("max_logit", 400.0, step, head=step)]), step)
    log.write(Judge(Thresholds(), rules=OF_STEPS).alerts([figure("loss_spike", 12.0, 300, None, "model")]), 300)
    assert len(seen) == 2 and "has followed the logit growth of step 100" in seen[1]
    watch.remove()


def test_waves_that_follow_a_spike_are_told_as_what_is_seen_and_have_no_number_of_places():
    judge = Judge(Thresholds(), rules=OF_STEPS)
    spike = judge.alerts([figure("loss_spike", 117.4, 71, None, "model")])
    waves = judge.alerts([figure("loss_waves", 0.4, 110, None, "model")])
    incidents = Incidents()
    incidents.add(spike)
    assert incidents.add(waves) == {
        "sorted_batches": "loss in waves from step 110 has followed the loss spike of step 71"
    }
    report = str(Diagnosis(140, 7, tuple(incidents.all), judge.ill()))
    assert "Beyond a limit now: loss in waves, loss spike." in report
    assert "the loss is 117 standard deviations above the 50 steps before\n" in report
