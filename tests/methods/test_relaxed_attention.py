import pytest
import torch
from naive import PADDING, qkv, seen_weights, weights

from headwise.attend.methods import RelaxedAttention
from headwise.numerics.masked import TowardsEarlier
from headwise.testing.calls import attend_with


@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"mask": PADDING}])
def test_the_uniform_part_spreads_over_allowed_keys(settings, form):
    q, k, _ = qkv()
    a = weights(q, k, **settings)
    uniform = (a > 0).float() / (a > 0).sum(-1, keepdim=True)
    torch.testing.assert_close(
        seen_weights(RelaxedAttention(gamma=0.3), q, k, form=form, **settings), 0.7 * a + 0.3 * uniform
    )


@pytest.mark.parametrize("form", ["fast", "textbook"])
def test_support_all_spreads_over_every_key_as_the_authors_do(form):
    q, k, _ = qkv()
    found = seen_weights(RelaxedAttention(gamma=0.3, support="all"), q, k, mask=PADDING, form=form)
    torch.testing.assert_close(found, 0.7 * weights(q, k, PADDING) + 0.3 / 6)


def gamma_of(method, **settings):
    q, k, _ = qkv(b=1, h=1, t=1, n=2)
    a = weights(q, k)[..., 0]
    return float(((seen_weights(method, q, k, **settings)[..., 0] - a) / (0.5 - a)).squeeze())


def test_fuzzy_gammas_are_normal_around_gamma_and_clipped():
    found = torch.tensor([gamma_of(RelaxedAttention(gamma=0.5, fuzziness=0.1), seed=seed) for seed in range(200)])
    assert abs(found.mean() - 0.5) < 0.03 and abs(found.std() - 0.1) < 0.02
    clipped = torch.tensor([gamma_of(RelaxedAttention(gamma=0.0, fuzziness=0.5), seed=seed) for seed in range(40)])
    assert clipped.min() > -1e-5 and (clipped.abs() < 1e-5).sum() >= 10


@pytest.mark.bits
def test_evaluation_is_plain_unless_inference_is_matched():
    q, k, v = qkv()
    plain = attend_with([], q, k, v)[0]
    assert torch.equal(attend_with([RelaxedAttention(gamma=0.5)], q, k, v, training=False)[0], plain)
    assert gamma_of(
        RelaxedAttention(gamma=0.5, fuzziness=0.3, matched_inference=True), training=False
    ) == pytest.approx(0.5, abs=1e-4)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        RelaxedAttention(gamma=1.5)
    with pytest.raises(ValueError, match="fuzziness must be at least 0, got -1"):
        RelaxedAttention(fuzziness=-1.0)
    with pytest.raises(ValueError, match="support must be one of 'allowed', 'all', got 'some'"):
        RelaxedAttention(support="some")


def test_the_causal_mean_has_first_and_second_derivatives():
    out, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    share = torch.tensor(0.3, dtype=torch.float64)

    def relaxed(out, v):
        return TowardsEarlier.apply(out, v, share)

    wanted = 0.7 * out + 0.3 * torch.stack([v[:, :, : i + 1].mean(2) for i in range(5)], dim=2)
    torch.testing.assert_close(relaxed(out, v), wanted)
    assert torch.autograd.gradcheck(relaxed, (out, v))
    assert torch.autograd.gradgradcheck(lambda out, v: relaxed(out**2, v**3), (out, v))
