"""The spread of sampled sums over micro-batches, and the learning rate of Adagrad as its decay leaves it."""

from __future__ import annotations

import pytest
import torch

from headwise.health.statistics.sharpness import stability
from headwise.health.statistics.tally import CONFIDENCE, Tally


def test_the_variances_of_micro_batches_add_up():
    one, other = (
        Tally(torch.tensor([4.0]), torch.tensor([2.0]), torch.tensor([spread]), True) for spread in (3.0, 4.0)
    )
    both = one.add(other)
    # 9 + 16 = 25
    assert both.spread.item() == pytest.approx(5.0) and both.margin().item() == pytest.approx(CONFIDENCE * 5 / 4)
    whole = Tally(torch.tensor([4.0]), torch.tensor([2.0]))
    assert one.add(whole).spread.item() == whole.add(one).spread.item() == 3.0


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_decay_of_adagrads_rate_raises_its_threshold(decay):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([weight], lr=0.1, lr_decay=decay)
    for _ in range(4):
        weight.grad = torch.ones(3)
        optimizer.step()
    assert stability(optimizer, [weight]).threshold == pytest.approx(2 / (0.1 / (1 + 4 * decay)))
