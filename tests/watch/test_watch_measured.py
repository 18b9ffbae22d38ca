"""Alerts quote how good they were found to be, and an audit of a healthy model does not speak of collapse."""

import json

import pytest
from watched_model import figure

from headwise.health.health_records import figures_among
from headwise.health.statistics.alert_remedies import REMEDIES
from headwise.health.watching import alerts
from headwise.health.watching.alerts import Judge
from headwise.health.watching.diagnosis import Incidents, told
from headwise.health.watching.rules import RULES, Thresholds

FOUND = {"entropy_collapse": {"faults": 30, "caught": 12, "lead": 24.0, "healthy_steps": 50_000, "false_alarms": 2}}


def said(found):
    return told(Incidents().add(found))


def judged(shares, **settings):
    judge = Judge(Thresholds(), **settings)
    return [
        alert for step, value in enumerate(shares) for alert in judge.alerts([figure("entropy_share", value, step)])
    ]


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Put a file of measured alarms where the package keeps it."""
    (tmp_path / alerts.FILE).write_text(json.dumps(FOUND))
    monkeypatch.setattr(alerts, "files", lambda package: tmp_path)
    alerts.measured.cache_clear()
    yield
    alerts.measured.cache_clear()


def test_an_alert_quotes_its_lead_and_its_false_alarms(kept):
    (alert,) = judged([0.5, 0.01])
    assert alert["measured"] == (
        "In tests: caught 12 of 30 faults, typically 24 steps early; 2 false alarms in 50,000 healthy steps."
    )
    assert said([alert]).endswith(alert["measured"])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"false_alarms": 0}, "caught 12 of 30 faults, typically 24 steps early; no false alarms in 50,000 healthy"),
        ({"caught": 0, "lead": None, "false_alarms": 1}, "caught none of 30 faults; 1 false alarm in 50,000 healthy"),
        ({"lead": 0.0}, "typically as the loss showed them;"),
        ({"lead": 1.0}, "typically 1 step early;"),
    ],
)
def test_the_quality_of_an_alarm_reads_as_a_sentence(kept, found, words):
    alerts.measured()["entropy_collapse"].update(found)
    assert words in alerts.in_words("entropy_collapse")


def test_an_alert_that_was_not_measured_says_so(kept):
    judge = Judge(Thresholds())
    (alert,) = judge.alerts([figure("max_logit", 200.0)])
    assert alert["measured"] == alerts.UNKNOWN and "Not measured" in said([alert])


def test_the_only_reading_of_a_checkpoint_tells_of_sharp_heads_and_of_no_collapse():
    for away, words in ((1.02, "1.02 tokens away on average (a positional head)"), (7.5, "7.5 tokens away on average")):
        records = figures_among([figure("entropy_share", 0.01), figure("attention_distance", away)])
        (alert,) = Judge(Thresholds(), at_once=True).alerts(records)
        assert alert["alert"] == "sharp_head" and alert["sentence"].endswith(words)
        assert not any("collapse" in text or "measured" in text for text in [said([alert])])
    (alert,) = judged([0.01], at_once=True)
    assert alert["sentence"].endswith("it looks at about one key for each query")


def test_every_rule_has_a_remedy_while_training_and_one_of_a_checkpoint():
    assert [rule.alert for rule in RULES if not rule.in_audits] == ["mask_lost"]
    assert "mask_lost" in REMEDIES
    for rule in (rule for rule in RULES if rule.in_audits):
        name = rule.of_checkpoint or rule.alert
        checkpoint = REMEDIES[f"{name} of a checkpoint"].text
        assert rule.alert in REMEDIES
        assert not any(word in checkpoint for word in ("learning rate", "warm-up", "clipped gradients")), name
