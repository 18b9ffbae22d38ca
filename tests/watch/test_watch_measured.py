"""Alerts quote how good they were found to be, and an audit of a healthy model does not speak of collapse."""

import json

import pytest
from watched_model import figure

from headwise.files.health_records import figures_among
from headwise.statistics.alert_remedies import REMEDIES
from headwise.watching import alerts
from headwise.watching.alerts import Judge, told
from headwise.watching.rules import RULES, Thresholds

FOUND = {
    "entropy_collapse": {
        "faults": 30,
        "caught": 12,
        "lead": 24.0,
        "healthy_steps": 50_000,
        "per_1000": [0.04, 0.01, 0.117],
    }
}


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
        "caught 12 of 30 faults, 24 steps before the loss at the median, 0.04 [0.01, 0.117] false alarms in 1,000 "
        "healthy steps "
        "(docs/results/alarms)"
    )
    assert told([alert])[0].endswith(alert["measured"])


def test_an_alert_that_was_not_measured_says_so(kept):
    judge = Judge(Thresholds())
    (alert,) = judge.alerts([figure("max_logit", 200.0)])
    assert alert["measured"] == alerts.UNKNOWN and "not measured" in told([alert])[0]


def test_the_only_reading_of_a_checkpoint_tells_of_sharp_heads_and_of_no_collapse():
    for away, words in (
        (1.02, "1.02 tokens away on average (a positional head)"),
        (7.5, "7.5 tokens away on average"),
    ):
        records = figures_among([figure("entropy_share", 0.01), figure("attention_distance", away)])
        (alert,) = Judge(Thresholds(), at_once=True).alerts(records)
        assert alert["alert"] == "sharp_head" and alert["sentence"].endswith(words)
        assert not any("collapse" in text or "measured" in text for text in told([alert]))
    (alert,) = judged([0.01], at_once=True)
    assert alert["sentence"].endswith("it looks at about one key for each query")


def test_every_rule_has_a_remedy_while_training_and_one_of_a_checkpoint():
    for rule in RULES:
        name = rule.of_checkpoint or rule.alert
        checkpoint = REMEDIES[f"{name} of a checkpoint"].text
        assert rule.alert in REMEDIES
        assert not any(word in checkpoint for word in ("learning rate", "warm-up", "clipped gradients")), name
