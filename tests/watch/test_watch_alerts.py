import json
import math
import re

import pytest
import torch
from watch.watched_model import VECTORS, figure, read, sharpen, watched

from headwise.health.watching.alerts import HealthAlert, HealthWarning, Judge, Thresholds
from headwise.health.watching.logs import JsonLines, TensorBoard


def test_entropy_collapse_is_told_with_head_steps_and_remedy():
    judge = Judge(Thresholds())
    assert judge.alerts([figure("entropy_share", 0.5, step=60)]) == []
    (alert,) = judge.alerts([figure("entropy_share", 0.01, step=100)])
    assert alert["sentence"] == (
        "the entropy of blocks.3.attn head 2 fell below 5 % of its range (now 0.01) within 40 steps"
    )
    assert alert["since"] == 60
    assert "SigmaReparam or QKNorm bound it" in alert["remedy"]
    assert "2303.06296" in alert["source"]
    assert (alert["alert"], alert["head"], alert["step"], alert["threshold"]) == ("entropy_collapse", 2, 100, 0.05)


def test_an_alert_is_told_once_until_the_figure_recovers():
    judge = Judge(Thresholds())
    values = [0.5, 0.01, 0.01, 0.5, 0.01]
    told = [len(judge.alerts([figure("entropy_share", value, step=step)])) for step, value in enumerate(values)]
    assert told == [0, 1, 0, 0, 1]


def test_a_head_that_a_checkpoint_brings_with_low_entropy_is_no_collapse():
    assert Judge(Thresholds()).alerts([figure("entropy_share", 0.01)]) == []


@pytest.mark.parametrize(
    ("alert", "well", "ill"),
    [
        ("logit_growth", [figure("max_logit", 99.0)], [figure("max_logit", 101.0)]),
        ("not_finite", [figure("max_logit", 99.0)], [figure("max_logit", math.nan)]),
        ("over_smoothing", [figure("token_cosine", 0.98, head=None)], [figure("token_cosine", 0.995, head=None)]),
        ("rank_collapse", [figure("high_frequency", 0.06, head=None)], [figure("high_frequency", 0.04, head=None)]),
        ("low_rank", [figure("effective_rank_vo", 2.5)], [figure("effective_rank_vo", 1.5)]),
        (
            "dead_head",
            [figure("output_norm", v, head=h) for h, v in enumerate((1.0, 1.2, 0.02))],
            [figure("output_norm", v, head=h) for h, v in enumerate((1.0, 1.2, 0.005))],
        ),
        (
            "dead_head",
            [figure("output_norm", v, head=h) for h, v in enumerate((1.0, 0.02, 0.02))],
            [figure("output_norm", v, head=h) for h, v in enumerate((1.0, 0.02, 0.0))],
        ),
        ("redundancy", [figure("head_redundancy", 0.98)], [figure("head_redundancy", 0.995)]),
        (
            "redundancy",
            [figure("head_redundancy", 0.995), figure("entropy_share", 0.95)],
            [figure("head_redundancy", 0.995), figure("entropy_share", 0.8)],
        ),
    ],
)
def test_every_alert_is_raised_beyond_its_limit_and_not_before(alert, well, ill):
    judge = Judge(Thresholds())
    assert judge.alerts(well) == []
    (found,) = judge.alerts(ill)
    assert found["alert"] == alert
    assert found["remedy"] and "arXiv" in found["source"] and "blocks.3.attn" in found["sentence"]


@pytest.mark.parametrize(
    "at_the_limit",
    [
        [figure("max_logit", 100.0)],
        [figure("entropy_share", 0.05)],
        [figure("effective_rank_vo", 2.0)],
        [figure("output_norm", v, head=h) for h, v in enumerate((1.0, 0.005))],
    ],
)
def test_a_figure_at_its_limit_is_not_beyond_it(at_the_limit):
    assert Judge(Thresholds(), at_once=True).alerts(at_the_limit) == []


def test_an_audits_judge_tells_of_what_is_ill_at_its_only_reading():
    judge = Judge(Thresholds(), at_once=True)
    (alert,) = judge.alerts([figure("entropy_share", 0.01)])
    assert (
        alert["sentence"]
        == "the entropy of blocks.3.attn head 2 is below 5 % of its range (0.01): it looks at about one key for each "
        "query"
    )


def test_the_two_products_of_a_head_are_told_of_each():
    judge = Judge(Thresholds())
    products = lambda qk, vo: [figure("effective_rank_qk", qk), figure("effective_rank_vo", vo)]
    # A product that was never healthy is no fall, whatever the other one was.
    assert judge.alerts(products(5.0, 1.0)) == []
    assert [a["statistic"] for a in judge.alerts(products(1.0, 1.0))] == ["effective_rank_qk"]
    assert judge.alerts(products(5.0, 5.0)) == []
    assert [a["statistic"] for a in judge.alerts(products(1.0, 1.0))] == ["effective_rank_qk", "effective_rank_vo"]


def test_a_layer_is_dead_head_by_head_even_where_most_heads_are():
    dead = lambda *norms: [
        a["head"] for a in Judge(Thresholds()).alerts([figure("output_norm", v, head=h) for h, v in enumerate(norms)])
    ]
    assert dead(1e-6, 1e-6, 1.0, 1e-6) == [0, 1, 3]
    assert dead(0.0, 0.0) == [0, 1]


def test_a_head_that_diverged_is_told_of_once_and_nothing_else_is_said_of_it():
    judge = Judge(Thresholds())
    figures = lambda *values: [
        figure(name, value) for name, value in zip(("entropy_share", "max_logit", "output_norm"), values, strict=True)
    ]
    assert judge.alerts(figures(0.5, 3.0, 1.0)) == []
    (alert,) = judge.alerts(figures(0.5, math.inf, math.nan))
    assert (alert["alert"], alert["statistic"]) == ("not_finite", "max_logit")
    assert "max logit of blocks.3.attn head 2 is inf: the training diverged" in alert["sentence"]
    assert judge.alerts(figures(math.nan, math.nan, math.nan)) == []


def test_thresholds_are_fields_that_switch_off_and_are_checked():
    assert Judge(Thresholds(max_logit=None)).alerts([figure("max_logit", 1e9)]) == []
    assert len(Judge(Thresholds(max_logit=5)).alerts([figure("max_logit", 6.0)])) == 1
    with pytest.raises(ValueError, match=r"Thresholds.max_logit must be a positive number or None, got -1"):
        Thresholds(max_logit=-1)


def test_alerts_warn_raise_or_call_as_asked():
    model, watch = watched(on_alert="warn")
    sharpen(model, 300)
    with pytest.warns(
        HealthWarning,
        match=r"Step 0: the largest logit of blocks.0.attn head \d exceeds 100 \(.*\), here and in .* heads\n"
        "  what to do: QKNorm",
    ):
        read(model, watch)
    model, watch = watched(on_alert="raise")
    sharpen(model, 300)
    model(VECTORS)
    with pytest.raises(HealthAlert, match=r"exceeds 100") as caught:
        watch.step()
    assert caught.value.alerts == watch.alerts()
    assert watch.records()
    seen = []
    model, watch = watched(on_alert=seen.append)
    sharpen(model, 300)
    read(model, watch)
    assert seen == watch.alerts()


def test_a_training_that_diverged_is_told_of_and_goes_on(tmp_path):
    model, watch = watched(statistics=None, log=[JsonLines(tmp_path / "a.jsonl"), TensorBoard(tmp_path / "b")])
    read(model, watch)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.fill_(torch.nan)
    read(model, watch)
    ill = [a for a in watch.alerts() if a["site"] == "blocks.0.attn"]
    assert {a["alert"] for a in ill} == {"not_finite"}
    assert len({a["head"] for a in ill}) == len(ill) > 1
    assert re.search(r"of blocks.0.attn head 0 is nan: the training diverged within 1 step", ill[0]["sentence"])
    assert watch.reasons()["blocks.0.attn"]["spectral_norm_qk"] == "the weights are not finite"
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])["value"] is None


def test_every_remedy_names_methods_that_exist():
    import re

    import headwise.attend.methods  # noqa: F401
    from headwise.attend.core.method import REGISTRY
    from headwise.health.statistics.alert_remedies import REMEDIES

    named = {word for remedy in REMEDIES.values() for word in re.findall(r"\b[A-Z][A-Za-z]+\b", remedy.text)}
    assert len(named & set(REGISTRY)) > 5
    assert {word for word in named if sum(map(str.isupper, word)) > 1} <= set(REGISTRY)


def test_every_alert_of_watch_and_audit_has_its_remedy_in_the_one_table():
    from headwise.health.auditing import weight_alerts
    from headwise.health.statistics.alert_remedies import REMEDIES, remedy_for, remedy_for_weights
    from headwise.health.watching import rules

    told = {rule.alert for rule in (*rules.RULES, *rules.OF_STEPS)}
    of_weights = {rule.alert for rule in weight_alerts.RULES} | {"not_finite"}
    at_once = {rule.of_checkpoint or rule.alert for rule in rules.RULES if rule.in_audits}
    used = [remedy_for(alert, trains=True) for alert in told] + [remedy_for(alert, trains=False) for alert in at_once]
    used += [remedy_for_weights(alert) for alert in of_weights]
    assert {id(remedy) for remedy in used} == {id(remedy) for remedy in REMEDIES.values()}
