"""A causal mask that is lost in training is named at the next reading, and a layer that never had one is not."""

import pytest
import torch
from torch.nn import functional as F
from watched_model import figure

import headwise
from headwise.health.watching.alerts import Judge
from headwise.health.watching.rules import Thresholds


class Attention(torch.nn.Module):
    """Causal attention by a flag or a mask."""

    def __init__(self):
        super().__init__()
        self.heads = self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (torch.nn.Linear(8, 8) for _ in range(4))
        self.seen = "flag"

    def forward(self, x):
        q, k, v = (part(x).unflatten(2, (2, 4)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        tokens = x.shape[1]
        below = torch.ones(tokens, tokens, dtype=torch.bool).tril(1 if self.seen == "shifted" else 0)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=below if self.seen in ("mask", "shifted") else None, is_causal=self.seen == "flag"
        )
        return self.out_proj(out.transpose(1, 2).flatten(2))


def alerts_after(*kinds):
    model = torch.nn.Sequential(Attention())
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["later_keys"])
    for kind in kinds:
        model[0].seen = kind
        model(torch.randn(2, 6, 8))
        watch.step()
    return watch


@pytest.mark.parametrize("before", ["flag", "mask"])
@pytest.mark.parametrize(("after", "share"), [("none", 1.0), ("shifted", sum(1 / n for n in range(1, 6)) / 5)])
def test_a_lost_or_shifted_mask_is_named_at_the_next_reading(before, after, share):
    watch = alerts_after(before, before, after, after)
    (alert,) = watch.alerts()
    assert (alert["alert"], alert["step"], alert["since"]) == ("mask_lost", 2, 1)
    assert alert["value"] == pytest.approx(share, rel=1e-5)
    assert alert["sentence"].startswith("queries of 0 see ") and "the causal mask is lost" in alert["sentence"]
    assert "is_causal" in alert["remedy"]


def test_a_layer_that_always_sees_later_tokens_or_changes_how_it_masks_is_no_alert():
    assert alerts_after("none", "none").alerts() == alerts_after("flag", "mask", "flag").alerts() == []


def test_an_audit_of_an_encoder_says_nothing_of_a_mask():
    assert Judge(Thresholds(), at_once=True).alerts([figure("later_keys", 1.0, head=None)]) == []
