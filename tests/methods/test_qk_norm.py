import pytest
import torch
from naive import qkv, weights

from headwise.attend.core.site import Site
from headwise.attend.methods import QKNorm
from headwise.testing.calls import attend_with, fit_standalone, standalone_site


def test_queries_and_keys_get_unit_mean_square_times_the_heads_gain():
    q, k, v = qkv()
    fitted = fit_standalone([QKNorm()], standalone_site(q, k))
    state = fitted.states[0]
    with torch.no_grad():
        state.tensor("query_gain").copy_(torch.tensor([1.0, 2.0, 3.0]))
        state.tensor("key_gain").copy_(torch.tensor([1.0, 0.5, 1.0]))
    unit_q = q / q.square().mean(-1, keepdim=True).sqrt() * state.tensor("query_gain").detach()[:, None, None]
    unit_k = k / k.square().mean(-1, keepdim=True).sqrt() * state.tensor("key_gain").detach()[:, None, None]
    for training in (True, False):
        out = attend_with(fitted.methods, 100 * q, 7 * k, v, fitted=fitted, training=training)[0]
        torch.testing.assert_close(out, weights(unit_q, unit_k) @ v)


def test_grouped_keys_learn_one_gain_per_key_head():
    q, _, _ = qkv(h=4)
    _, k, v = qkv(h=2)
    fitted = fit_standalone([QKNorm()], standalone_site(q, k))
    assert fitted.states[0].tensor("key_gain").shape == (2,)
    attend_with(fitted.methods, q, k, v, fitted=fitted)[0].square().sum().backward()
    assert (fitted.states[0].tensor("key_gain").grad != 0).all()


def test_it_gives_the_same_behind_rotary_positions_as_before_them():
    q, k, v = qkv()
    turn = torch.linalg.qr(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(5))).Q

    def rotate(x):
        return torch.einsum("bhtd,tde->bhte", x, turn)

    def unit(x):
        return x / x.square().mean(-1, keepdim=True).sqrt()

    torch.testing.assert_close(
        attend_with([QKNorm()], rotate(q), rotate(k), v)[0], weights(rotate(unit(q)), rotate(unit(k))) @ v
    )


def test_hosts_that_normalise_themselves_are_refused():
    assert "itself" in QKNorm().refuse(Site("x", torch.nn.Module(), qk_norm=True))


def test_the_layer_norm_of_vit_22b_subtracts_the_mean_first():
    q, k, v = qkv()
    fitted = fit_standalone([QKNorm(norm="layer")], standalone_site(q, k))
    with torch.no_grad():
        fitted.states[0].tensor("query_gain").copy_(torch.tensor([1.0, 2.0, 3.0]))

    def unit(x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    gain = fitted.states[0].tensor("query_gain").detach()[:, None, None]
    out = attend_with(fitted.methods, q + 3, k - 1, v, fitted=fitted)[0]
    torch.testing.assert_close(out, weights(unit(q) * gain, unit(k)) @ v)


def test_a_layer_norm_behind_rotary_positions_is_refused():
    site = Site("x", torch.nn.Module(), rope=True)
    assert "rotary" in QKNorm(norm="layer").refuse(site)
    assert QKNorm().refuse(site) is None


def test_the_gain_of_queries_starts_where_it_is_told():
    q, k, v = qkv()

    def unit(x):
        return x / x.square().mean(-1, keepdim=True).sqrt()

    out = attend_with([QKNorm(start=4.0)], q, k, v)[0]
    torch.testing.assert_close(out, weights(4 * unit(q), unit(k)) @ v)


@pytest.mark.parametrize("start", [0.0, -1.0])
def test_a_start_that_is_no_gain_is_refused(start):
    with pytest.raises(ValueError, match="QKNorm: start must be above 0, got"):
        QKNorm(start=start)
