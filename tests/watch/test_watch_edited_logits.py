"""What a watch reads beside methods that edit the logits, in blocks of queries and of a sample of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise import LSA
from headwise.attend.core.call import Call
from headwise.attend.core.method import REGISTRY, Method
from headwise.health.statistics import scan
from headwise.health.statistics.reading import Queries
from headwise.health.statistics.row_figures import RowFigures
from headwise.health.watching.observed import reading_of
from headwise.testing.calls import fit_standalone, standalone_site

B, H, T, D = 2, 3, 40, 8


class TakesTheMean(Method):
    """Takes the mean over queries from the logits, as a stranger writes it."""

    neutral = {}

    def logits(self, s: Tensor, call: Call) -> Tensor:
        allowed = call.allowed()
        shown = s if allowed is None else s.masked_fill(~allowed, 0.0)
        return s - shown.mean(-2, keepdim=True)


del REGISTRY["TakesTheMean"]

PADDED = (torch.arange(T) < torch.tensor([T, T - 9])[:, None])[:, None, None]
CALLS = {"plain": {}, "padded": {"mask": PADDED}, "causal": {"causal": True}}


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("method", [LSA(), TakesTheMean()], ids=lambda method: type(method).__name__)
def test_each_row_is_edited_as_in_the_forward(
    method: Method, kind: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("BLOCK", 1), ("JOINED", 1), ("FEWEST_ROWS", 6)):
        monkeypatch.setattr(scan, name, size)
    g = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(B, H, T, D, generator=g) for _ in range(3))
    fitted = fit_standalone([method], standalone_site(q, k))
    reading = reading_of(Call(fitted, q, k, v, training=True, **CALLS[kind]), v)
    queries = Queries.of(reading, rows, torch.Generator().manual_seed(1))
    figures = RowFigures(reading, {"top", "entropy"}, queries)

    allowed = torch.ones(B, 1, T, T, dtype=torch.bool)
    allowed = allowed.tril() if kind == "causal" else allowed & CALLS[kind].get("mask", allowed)
    s = (q.double() @ k.double().mT) / D**0.5
    if isinstance(method, LSA):
        own = torch.eye(T, dtype=torch.bool) & (allowed.sum(-1, keepdim=True) > 1)
        s = s.masked_fill(~allowed | own, -torch.inf)
    else:
        s = (s - s.masked_fill(~allowed, 0.0).mean(-2, keepdim=True)).masked_fill(~allowed, -torch.inf)
    a = s.softmax(-1)
    entropy = -(a * a.clamp(min=1e-300).log()).sum(-1)
    positions = queries.positions.expand(B, -1)[:, None].expand(-1, H, -1)
    counted = queries.valid.expand(B, H, -1) > 0
    for got, wanted in ((figures.top, s.amax(-1)), (figures.entropy, entropy)):
        torch.testing.assert_close(got.double()[counted], wanted.gather(2, positions)[counted], rtol=1e-4, atol=1e-4)
