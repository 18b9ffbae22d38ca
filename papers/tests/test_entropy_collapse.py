"""The study of entropy collapse: its data and model, and alerts whose lead is told in steps."""

from __future__ import annotations

import json

import torch
from headwise_papers.entropy_collapse import STUDY, NoisyDigits
from torch import nn

from headwise.lab.studies.digits import images_and_digits
from headwise.lab.training.heads import alert_outcomes
from headwise_verdict.results.records import Divergence


def test_a_fifth_of_the_training_labels_is_random_and_no_test_label_is():
    _, labels = STUDY.task.data("train")
    _, true = images_and_digits(slice(400, None))
    # a random digit is right once in ten
    share = float((labels != true).float().mean())
    assert abs(share - 0.2 * 0.9) < 0.03
    assert torch.equal(STUDY.task.data("test")[1], images_and_digits(slice(0, 400))[1])
    assert torch.equal(labels, STUDY.task.data("train")[1])


def test_nothing_normalises_the_tokens_before_attention():
    model = NoisyDigits(dim=16, depth=2, heads=2).model()
    assert all(isinstance(block.norm1, nn.Identity) and isinstance(block.norm2, nn.LayerNorm) for block in model.blocks)


def test_the_study_is_watched_has_ten_seeds_and_judges_a_rise_of_the_loss():
    assert STUDY.watch and STUDY.seeds >= 10
    assert STUDY.arms == ("baseline", 'SigmaReparam(init="one")', 'QKNorm(norm="rms")')
    assert (STUDY.task.divergence_factor, STUDY.task.failure) == (1.2, 0.1)


def test_the_lead_is_the_steps_from_the_first_alert_to_the_divergence(tmp_path):
    records = [
        {"step": 95, "alert": "logit_growth"},
        {"step": 130, "statistic": "entropy_share", "value": 0.1},
        {"step": 130, "alert": "entropy_collapse"},
        {"step": 135, "alert": "entropy_collapse"},
        {"step": 155, "alert": "rank_collapse"},
    ]
    stream = tmp_path / "health.jsonl"
    stream.write_text("".join(json.dumps(record) + "\n" for record in records))
    # step 151, counted from 1, is the loss of the weights that a reading of step 150 sees
    found = alert_outcomes(stream, Divergence(step=151, why="loss rose"))
    assert found == {
        "alerts/logit_growth/step": 95.0,
        "alerts/entropy_collapse/step": 130.0,
        "alerts/logit_growth/lead": 55.0,
        "alerts/entropy_collapse/lead": 20.0,
    }
    healthy = alert_outcomes(stream, None)
    assert healthy["alerts/rank_collapse/step"] == 155.0 and not any(name.endswith("/lead") for name in healthy)
