import pytest
import torch
from naive import PADDING, qkv

from headwise.attend.core.call import Call
from headwise.attend.core.site import Site
from headwise.attend.methods import FeatScale
from headwise.testing.calls import fit_standalone, standalone_site


def scaled(mean_gain, rest_gain, y, **settings):
    q, k, v = qkv()
    method = FeatScale()
    fitted = fit_standalone([method], standalone_site(q, k, hidden=y))
    with torch.no_grad():
        fitted.states[0].tensor("mean_gain").fill_(mean_gain)
        fitted.states[0].tensor("rest_gain").fill_(rest_gain)
    return method.branch(y, Call(fitted, q, k, v, **settings))


def test_mean_and_rest_are_scaled_once():
    y = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))
    mean = y.mean(1, keepdim=True)
    torch.testing.assert_close(scaled(0.5, 0.2, y), 1.5 * mean + 1.2 * (y - mean))


def test_the_mean_leaves_padded_tokens_out():
    y = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))
    mean = torch.stack([y[0].mean(0), y[1, :4].mean(0)])[:, None]
    torch.testing.assert_close(scaled(0.5, 0.0, y, mask=PADDING), y + 0.5 * mean)


def test_no_token_sees_the_future_in_a_causal_call():
    y = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))
    changed = y.clone()
    changed[:, 4:] += 1
    before, after = (scaled(0.5, 0.3, x, causal=True) for x in (y, changed))
    torch.testing.assert_close(before[:, :4], after[:, :4])


def test_it_starts_where_nothing_changes():
    y = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))
    assert torch.equal(scaled(0.0, 0.0, y), y)


@pytest.mark.parametrize(
    ("fact", "reason"), [("is_cross", "future"), ("causal", "only the new one"), ("windowed", "window")]
)
def test_sites_without_all_tokens_at_hand_are_refused(fact, reason):
    site = Site("x", torch.nn.Module())
    assert FeatScale().refuse(site) is None
    setattr(site, fact, True)
    assert reason in FeatScale().refuse(site)


def test_a_cached_call_is_refused_with_the_remedy():
    q, k, v = qkv(t=1, n=6)
    method = FeatScale()
    fitted = fit_standalone([method], standalone_site(q, k, hidden=torch.ones(2, 1, 12)))
    with pytest.raises(ValueError, match="1 queries and 6 keys; run it without a cache"):
        method.branch(torch.ones(2, 1, 12), Call(fitted, q, k, v))
