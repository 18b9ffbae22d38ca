import torch
from naive import qkv, weights

from headwise.core.site import Site
from headwise.methods import QKNorm
from headwise.regularizing.standalone import attend_with, fit_alone, lone_site


def test_queries_and_keys_get_unit_mean_square_times_the_heads_gain():
    q, k, v = qkv()
    fitted = fit_alone([QKNorm()], lone_site(q, k))
    store = fitted.stores[0]
    with torch.no_grad():
        store.query_gain.copy_(torch.tensor([1.0, 2.0, 3.0]))
        store.key_gain.copy_(torch.tensor([1.0, 0.5, 1.0]))
    unit_q = q / q.square().mean(-1, keepdim=True).sqrt() * store.query_gain.detach()[:, None, None]
    unit_k = k / k.square().mean(-1, keepdim=True).sqrt() * store.key_gain.detach()[:, None, None]
    for training in (True, False):
        out = attend_with(fitted.methods, 100 * q, 7 * k, v, fitted=fitted, training=training)[0]
        torch.testing.assert_close(out, weights(unit_q, unit_k) @ v)


def test_grouped_keys_learn_one_gain_per_key_head():
    q, _, _ = qkv(h=4)
    _, k, v = qkv(h=2)
    fitted = fit_alone([QKNorm()], lone_site(q, k))
    assert fitted.stores[0].key_gain.shape == (2,)
    attend_with(fitted.methods, q, k, v, fitted=fitted)[0].square().sum().backward()
    assert (fitted.stores[0].key_gain.grad != 0).all()


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
