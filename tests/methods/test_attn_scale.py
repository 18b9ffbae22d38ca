import pytest
import torch
from naive import PADDING, qkv

from headwise.attend.methods import AttnScale, RelaxedAttention
from headwise.testing.calls import attend_with, fit_standalone, standalone_site


def scaled(gains, q, k, v, training=True, form="fast", **settings):
    fitted = fit_standalone([AttnScale()], standalone_site(q, k))
    gain = fitted.states[0].tensor("gain")
    with torch.no_grad():
        gain.copy_(torch.tensor(gains))
    return attend_with(fitted.methods, q, k, v, fitted=fitted, training=training, form=form, **settings)[0], gain


@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}])
def test_a_gain_of_minus_gamma_is_relaxed_attention(settings, form):
    q, k, v = qkv()
    relaxed = attend_with([RelaxedAttention(gamma=0.3)], q, k, v, **settings)[0]
    torch.testing.assert_close(scaled([-0.3] * 3, q, k, v, form=form, **settings)[0], relaxed)


def test_each_head_has_its_own_gain_with_a_gradient():
    q, k, v = qkv()
    plain = attend_with([], q, k, v)[0]
    out, gain = scaled([0.0, 0.5, 0.0], q, k, v, training=False)
    assert (out != plain).any(-1).any(-1).any(0).tolist() == [False, True, False]
    out.square().sum().backward()
    assert (gain.grad != 0).all()


def test_it_starts_where_nothing_changes():
    q, k, v = qkv()
    torch.testing.assert_close(attend_with([AttnScale()], q, k, v)[0], attend_with([], q, k, v)[0], atol=1e-6, rtol=0)
