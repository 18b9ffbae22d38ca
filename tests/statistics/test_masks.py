"""Which keys a float mask allows: "not allowed" is written in several ways, a bias of positions is none of them."""

import pytest
import torch

from headwise.health.statistics import Reading, read
from headwise.numerics.masked import MASKED

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, 4, 9, 8, generator=GENERATOR) for _ in range(3))
HIDDEN = torch.randn(2, 9, 32, generator=GENERATOR)
REAL = torch.arange(9) < torch.tensor([[9], [6]])
NAMES = ["entropy_share", "attention_entropy", "lowest_entropy", "entropy_floor_centred", "max_logit", "token_cosine"]


def figures(mask):
    seen = mask if mask.dtype == torch.bool else mask > MASKED
    real = seen.any(2).any(1).expand(2, 9)
    reading = Reading(Q, K, V, mask=mask, hidden=HIDDEN, real_queries=real)
    return {name: tally.value() for name, tally in read(reading, NAMES).items()}


@pytest.mark.parametrize(
    "lowest", [-1e4, torch.finfo(torch.float16).min, -1e9, torch.finfo(torch.float32).min, -torch.inf]
)
def test_every_way_to_write_not_allowed_reads_like_a_bool_mask(lowest):
    allowed = REAL[:, None, None]
    want = figures(allowed)
    got = figures(torch.zeros(allowed.shape).masked_fill(~allowed, lowest))
    for name in NAMES:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("slope", [0.5, 100.0, 900.0])
def test_a_bias_of_positions_is_no_mask(slope):
    away = (torch.arange(9) - torch.arange(9)[:, None]).abs().float()
    reading = Reading(Q, K, V, mask=-slope * away)
    assert reading.allowed_counts().eq(9).all()
    entropy = read(reading, ["attention_entropy", "entropy_share"])
    share = entropy["attention_entropy"].value() / torch.tensor(9.0).log()
    torch.testing.assert_close(entropy["entropy_share"].value(), share)
