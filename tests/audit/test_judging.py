"""Alerts on weights are raised where their limits say, and the worst heads come first."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from headwise.attend.core.method import REGISTRY
from headwise.attend.regularizing.model_card import beyond_weights
from headwise.health.auditing.audit import WeightThresholds, audit
from headwise.health.auditing.page import audit_page
from headwise.health.auditing.result import distances, worst_heads
from headwise.health.auditing.summary import lead, markdown
from headwise.health.statistics.alert_remedies import EXPORTED, REMEDIES, remedy_for

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Audit an encoder of four layers after a change of its attention weights."""

    def check(change, **limits):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
        model = nn.TransformerEncoder(layer, 4)
        for part in model.layers:
            nn.init.normal_(part.self_attn.in_proj_weight, std=0.2)
            nn.init.normal_(part.self_attn.out_proj.weight, std=0.2)
        with torch.no_grad():
            change(model.layers[2].self_attn)
        import sys
        import types

        (tmp_path / "built.py").write_text("from handed_over import model\ndef build():\n    return model\n")
        monkeypatch.setitem(sys.modules, "handed_over", types.SimpleNamespace(model=model))
        return audit(f"{tmp_path / 'built.py'}:build", thresholds=WeightThresholds(**limits))

    return check


def head(index):
    return slice(index * SIZE, (index + 1) * SIZE)


def grow(attention):
    attention.in_proj_weight[head(1)] *= 40


def silence(attention):
    attention.out_proj.weight[:, head(3)] *= 1e-4


def flatten(attention):
    rows = attention.in_proj_weight[head(0)]
    attention.in_proj_weight[head(0)] = torch.outer(torch.ones(SIZE), rows[0])


def decay(attention):
    rows = torch.zeros(SIZE, WIDTH)
    rows[0, 0], rows[1, 1] = 1.0, 0.2
    attention.in_proj_weight[head(2)] = rows
    attention.in_proj_weight[WIDTH:][head(2)] = rows


CASES = [
    (grow, "logit_growth", 1, r"can make large logits: the spectral norm of W_KᵀW_Q is .* times the model's median"),
    (silence, "dead_head", 3, "writes next to nothing: the norm of W_OW_V is"),
    (flatten, "rank_collapse", 0, "is nearly of rank one: its stable rank is 1.000, below 1.2"),
    (decay, "low_rank_by_decay", 2, "weight decay has made W_KᵀW_Q of layers.2.self_attn head 2 low-rank"),
]


@pytest.mark.parametrize(("change", "alert", "index", "sentence"), CASES, ids=[case[1] for case in CASES])
def test_an_ill_head_raises_its_alert_and_is_the_worst(checked, change, alert, index, sentence):

    found = checked(change)
    hits = [a for a in found.alerts if a["alert"] == alert]
    assert [(a["site"], a["head"]) for a in hits] == [("layers.2.self_attn", index)]
    assert re.search(sentence, hits[0]["sentence"])
    assert hits[0]["remedy"]
    assert hits[0]["source"]
    assert (found.worst()[0]["site"], found.worst()[0]["head"]) == ("layers.2.self_attn", index)


def test_a_layer_of_which_most_heads_are_dead_shows_them(checked):
    def silence_three(attention):
        attention.out_proj.weight[:, : 3 * SIZE] *= 1e-4

    found = [a for a in checked(silence_three).alerts if a["alert"] == "dead_head"]
    assert [(a["site"], a["head"]) for a in found] == [("layers.2.self_attn", head) for head in range(3)]


def test_weights_that_overflow_are_told(checked):
    def overflow(attention):
        attention.in_proj_weight *= 1e30

    found = [a for a in checked(overflow).alerts if a["alert"] == "not_finite"]
    assert [a["site"] for a in found] == ["layers.2.self_attn"]
    assert "are too large for single precision" in found[0]["sentence"]


def test_a_healthy_model_raises_none(checked):
    assert checked(lambda attention: None).alerts == []


def test_limits_can_be_moved_and_switched_off(checked):
    assert not [a for a in checked(grow, growth=None).alerts if a["alert"] == "logit_growth"]
    assert len([a for a in checked(lambda a: None, growth=0.5).alerts if a["alert"] == "logit_growth"]) == 16


def test_heads_that_are_all_alike_are_not_ranked_by_noise():
    records = [
        {"site": "a", "depth": 0, "head": h, "statistic": "spectral_norm_qk", "value": 1 + 1e-4 * h * h}
        for h in range(12)
    ]
    assert all(head["score"] == 0 and head["reasons"] == [] for head in worst_heads(records, []))


def test_a_figure_that_is_zero_on_most_heads_does_not_drown_the_others():
    shares = [0.0] * 20 + [0.02, 0.7]
    records = [
        {"site": "a", "depth": 0, "head": h, "statistic": "peaked_rows", "value": v} for h, v in enumerate(shares)
    ]
    scores = {head["head"]: head["score"] for head in worst_heads(records, [], 22)}
    assert scores[20] == 0
    assert 1 < scores[21] <= 10


def test_one_or_two_values_have_a_median_and_no_spread():
    assert distances([0.25]) == (0.25, [0.0])
    assert distances([1.0, 3.0]) == (2.0, [0.0, 0.0])


def test_the_markdown_lists_worst_heads_alerts_and_how_it_was_made(checked):
    text = markdown(checked(silence))
    assert text.index("## Alerts") < text.index("### What to do") < text.index("## Worst heads")
    assert "- **Layer 2 head 3** Dead head: The head writes next to nothing: the norm of W_OW_V is " in text
    assert re.search(r"below 0.5 % of its layer's largest \(\d", text)
    assert "- **Dead head** (1): Prune it" in text
    assert "torch " in text


def test_the_terminal_shows_the_worst_of_each_statistic_in_eighty_columns(checked, tmp_path):
    import io

    from rich.console import Console

    from headwise.health.auditing.command import show

    console = Console(width=80, file=io.StringIO())
    show(checked(silence), console)
    table = console.file.getvalue().split("All heads")[1].split("The report has")[0]
    rows = [line.split() for line in table.splitlines() if " of W_" in line]
    assert len(rows) == 8
    assert all("head" in row for row in rows)
    assert max(map(len, table.splitlines())) <= 80


def sharp(of, head=0):
    """Return an audit whose only alert needs no action."""
    alert = {"alert": "sharp_head", "site": "layers.2.self_attn", "depth": 2, "head": head, "step": 0, "value": 0.01}
    alert |= {"statistic": "entropy_share", "threshold": 0.05, "measured": ""}
    remedy = remedy_for("sharp_head", trains=False)
    alert["sentence"] = f"entropy of layers.2.self_attn head {head} is below 5 % of its range (0.01)"
    return replace(of, alerts=[alert | {"remedy": remedy.text, "source": remedy.source}])


def test_what_needs_no_action_is_folded_adds_nothing_to_a_score_and_fails_only_by_its_name(
    checked, tmp_path, monkeypatch
):
    from headwise.health.auditing import command

    plain = checked(lambda attention: None)
    found = sharp(plain)
    assert [head["score"] for head in found.worst(16)] == [head["score"] for head in plain.worst(16)]
    assert lead(found) == "No statistic of 16 heads in 4 layers calls for action."
    page = audit_page(found)
    assert "<summary><h3>1 head to know of; no action needed</h3></summary>" in page
    assert "<dd>Sharp head: Entropy is below 5 % of its range (0.01).</dd>" in page
    assert "## No action needed: 1 head" in markdown(found)
    monkeypatch.setattr(command, "audit", lambda *_, **__: found)
    command.command("built.py:build", None, None, None, fail_on=["any"])
    with pytest.raises(SystemExit):
        command.command("built.py:build", None, None, None, fail_on=["sharp_head"])


def test_the_page_begins_with_alerts_by_head_and_ends_in_no_empty_reason(checked):
    page = audit_page(checked(silence))
    assert page.index('id="alerts"') < page.index("What to do") < page.index('id="worst-heads"')
    first = page.split('id="alerts"')[1].split("What to do")[0]
    assert first.count("<dt>") == 1 and "<dt>Layer 2 head 3</dt>" in first
    assert "<summary><h3>How the score is made</h3></summary>" in page and "nothing stands out" not in page
    # on paper there is no pointer
    assert re.search(r"@media print \{.*?\.trace[^}]*display: none", page, re.DOTALL)


def test_an_alert_names_the_methods_that_survive_the_export_to_a_stock_model():
    """What the remedies promise is what handle.export decides by."""
    import headwise.attend.methods  # noqa: F401  # registers the methods

    for name, exact in EXPORTED.items():
        assert bool(beyond_weights([REGISTRY[name]()])) == (not exact), name
    assert (
        "SigmaReparam and QKClip can be exported to a stock model exactly; the export of QKNorm is refused"
        in REMEDIES["logit_growth of weights"].text
    )
    assert "export" not in REMEDIES["dead_head"].text


def test_an_audit_shows_itself_in_one_line(checked):
    shown = repr(checked(silence))
    assert "built.py:build: 4 layers, 16 heads, " in shown and "alerts" in shown and len(shown) < 200


def test_without_a_terminal_no_bar_is_drawn_even_where_colours_are_asked_for(tmp_path, monkeypatch, capfd):
    from headwise.health.auditing.command import run

    # as the kernel of a notebook sets it
    monkeypatch.setenv("FORCE_COLOR", "1")
    (tmp_path / "plain.py").write_text(
        "from torch import nn\ndef build():\n    return nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)\n"
    )
    run(f"{tmp_path / 'plain.py'}:build")
    assert "reading layers" not in capfd.readouterr().err


def test_an_alert_that_is_asked_for_has_its_exit_code(checked, tmp_path, monkeypatch, capsys):
    from headwise.health.auditing import command

    found = checked(silence)
    names = {alert["alert"] for alert in found.alerts}
    assert "dead_head" in names and "not_finite" not in names
    monkeypatch.setattr(command, "audit", lambda *_, **__: found)
    for asked in (["dead_head"], ["not_finite,dead_head"], ["any"]):
        with pytest.raises(SystemExit) as end:
            command.command("built.py:build", None, None, tmp_path / "audit.html", as_json=True, fail_on=asked)
        assert end.value.code == 3
        printed = json.loads(capsys.readouterr().out)
        assert {alert["alert"] for alert in printed["alerts"]} == names
        assert json.loads((tmp_path / "audit.json").read_text()) == printed
    # without being asked, or for another alert, it is no failure
    command.command("built.py:build", None, None, None)
    command.command("built.py:build", None, None, None, fail_on=["not_finite"])
    with pytest.raises(
        ValueError, match=r"--fail-on dead_haed: there is no such alert. Alerts: entropy_.*, sharp_head, .*any\.$"
    ):
        command.command("built.py:build", None, None, None, fail_on=["dead_haed"])
