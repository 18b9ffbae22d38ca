"""The balance of a checkpoint's factors: norms by definition, a verdict with its figures, in every form of the
report."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headwise_papers.tasks.character_lm import CharacterModel
from torch import Tensor

from headwise.health.auditing.audit import Audit, audit
from headwise.health.auditing.summary import markdown
from headwise.health.auditing.weights import NEARLY, compared
from headwise.health.statistics.weights.balance import balance
from headwise.health.statistics.weights.product import Product


def balanced(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of columns · rows that weight decay would leave: both with the roots of its singular
    values."""
    u, values, vt = torch.linalg.svd(columns @ rows, full_matrices=False)
    size = len(rows)
    root = values[:size].sqrt()
    return root[:, None] * vt[:size], u[:, :size] * root


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Audit a character model, its values and output balanced where asked for."""

    def check(*, balance_values: bool) -> tuple[Audit, CharacterModel]:
        torch.manual_seed(0)
        model = CharacterModel(65, 16, 32, 4, 2, 2)
        if balance_values:
            with torch.no_grad():
                for block in model.blocks:
                    attn = block.attn
                    for head in range(4):
                        at = slice(8 * head, 8 * head + 8)
                        attn.value.weight[at], attn.out.weight[:, at] = balanced(
                            attn.value.weight[at], attn.out.weight[:, at]
                        )
        import sys

        (tmp_path / "built.py").write_text("from handed_over import model\ndef build():\n    return model\n")
        monkeypatch.setitem(sys.modules, "handed_over", SimpleNamespace(model=model))
        return audit(f"{tmp_path / 'built.py'}:build"), model

    return check


def test_norms_are_those_of_the_weights(audited) -> None:
    found, model = audited(balance_values=False)
    attn = model.blocks[1].attn
    one = found.balances["blocks.1.attn|2|vo"]
    at = slice(16, 24)
    p, v = attn.out.weight[:, at].detach(), attn.value.weight[at].detach()
    assert one["own"] == pytest.approx(p.norm(dim=0).tolist(), rel=1e-5)
    assert one["shared"] == pytest.approx(v.norm(dim=1).tolist(), rel=1e-5)
    assert one["frobenius"] == pytest.approx(float(p.square().sum() + v.square().sum()) / 2, rel=1e-5)
    assert one["nuclear"] == pytest.approx(float(torch.linalg.svdvals(p @ v).sum()), rel=1e-5)
    one = found.balances["blocks.1.attn|2|qk"]
    assert one["own"] == pytest.approx(attn.query.weight[at].norm(dim=1).tolist(), rel=1e-5)


def test_balanced_factors_are_nearly_identical_and_others_are_not(audited) -> None:
    by_product = {True: {}, False: {}}
    for balance_values in (True, False):
        found, _ = audited(balance_values=balance_values)
        for one in compared(found.balances):
            by_product[balance_values].setdefault(one["product"], []).append(one)
    for one in by_product[True]["vo"]:
        assert one["deviation"] < 1e-5 and one["verdict"] == "nearly identical" and one["correlation"] > 0.999
    rows, norms = by_product[False]["vo"]
    assert rows["deviation"] > NEARLY and rows["verdict"] == norms["verdict"] == "not identical"
    assert len(rows["pairs"]) == 2 * 32 and len(norms["pairs"]) == 2 * 4
    assert by_product[True]["qk"] == by_product[False]["qk"]
    first, second = zip(*norms["pairs"], strict=True)
    mean = (sum(first) + sum(second)) / 2
    assert norms["deviation"] == pytest.approx(sum(abs(x - y) for x, y in norms["pairs"]) / mean)
    assert norms["correlation"] == pytest.approx(float(torch.corrcoef(torch.tensor([first, second]))[0, 1]), rel=1e-4)


def test_heads_that_share_and_rotary_pairs_are_taken_together() -> None:
    torch.manual_seed(0)
    own, shared = torch.randn(4, 6, 20), torch.randn(2, 6, 20)
    found = balance(Product("vo", own, shared))
    assert torch.allclose(found.own[1], own[2:].square().sum((0, 2)).sqrt())
    pairs = torch.tensor([[0, 3], [1, 4], [2, 5]])
    found = balance(Product("qk", own, shared, pairs))
    assert torch.allclose(
        found.shared[0], (shared[0].norm(dim=1)[:3].square() + shared[0].norm(dim=1)[3:].square()).sqrt()
    )


def test_the_report_says_it_as_a_table_and_figures(audited, tmp_path: Path) -> None:
    found, _ = audited(balance_values=True)
    page = found.write(tmp_path / "report.html")[0].read_text(encoding="utf-8")
    assert "Balance of the factors" in page and "Column norm of W_O against row norm of W_V, W_OW_V" in page
    text = markdown(found)
    assert "| W_OW_V | column norm of W_O against row norm of W_V | 64 | 0.0% | 1.000 | nearly identical |" in text
    assert '"blocks.0.attn|0|vo": {"own": [' in found.to_json()


def test_weights_of_zero_have_no_figure() -> None:
    one = compared({"a|0|vo": {"own": [0.0], "shared": [0.0], "frobenius": 0.0, "nuclear": 0.0}})
    assert all(math.isnan(found["deviation"]) and math.isnan(found["correlation"]) for found in one)
    assert {found["verdict"] for found in one} == {"cannot be determined"}
