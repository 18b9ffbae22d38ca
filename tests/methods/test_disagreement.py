import pytest
import torch
from naive import PADDING, logits_of, penalty, qkv, weights

from headwise.attend.core.site import Site
from headwise.attend.methods import Disagreement


def mean_cosine(x, dims):
    """Write out 1/H² ΣΣ cos(x_i, x_j) over the given dimensions, heads in dimension 1."""
    heads = x.unbind(1)
    cosines = [(a * b).sum(dims) / (a.square().sum(dims) * b.square().sum(dims)).sqrt() for a in heads for b in heads]
    return torch.stack(cosines).mean(0)


def test_output_is_the_mean_cosine_of_the_heads_outputs_in_each_token():
    q, k, v = qkv()
    out = weights(q, k) @ v
    torch.testing.assert_close(penalty(Disagreement(strength=0.5), q, k, v), 0.5 * mean_cosine(out, (-1,)).mean())
    found = penalty(Disagreement(flatten=True), q, k, v)
    torch.testing.assert_close(found, mean_cosine(out, (-2, -1)).mean())


def test_values_take_the_values_and_leave_padding_out():
    q, k, v = qkv()
    torch.testing.assert_close(penalty(Disagreement(on="values"), q, k, v), mean_cosine(v, (-1,)).mean())
    wanted = (mean_cosine(v[:1], (-1,)).mean() + mean_cosine(v[1:, :, :4], (-1,)).mean()) / 2
    torch.testing.assert_close(penalty(Disagreement(on="values"), q, k, v, mask=PADDING), wanted)


def test_output_leaves_padded_queries_out():
    q, k, v = qkv()
    for flatten in (False, True):
        method = Disagreement(flatten=flatten)
        found = penalty(method, q[1:], k[1:], v[1:], mask=PADDING[1:])
        torch.testing.assert_close(found, penalty(method, q[1:, :, :4], k[1:, :, :4], v[1:, :, :4]))


def test_position_is_the_overlap_of_the_maps():
    q, k, v = qkv()
    a = weights(q, k)
    wanted = torch.stack([(a[:, i] * a[:, j]).sum((1, 2)) for i in range(3) for j in range(3)]).sum(0) / 9
    torch.testing.assert_close(penalty(Disagreement(on="position"), q, k, v), wanted.mean())


def test_position_of_known_maps():
    n = 8
    eye, uniform = torch.eye(n), torch.full((n, n), 1 / n)
    for maps, wanted in [((eye, eye), n), ((eye, eye.roll(1, 0)), n / 2), ((uniform, uniform), 1.0)]:
        q, k = logits_of(torch.stack(maps)[None])
        assert float(penalty(Disagreement(on="position"), q, k, k)) == pytest.approx(wanted, rel=1e-4)


def test_a_single_head_is_refused():
    assert "only one" in Disagreement().refuse(Site("x", torch.nn.Module(), heads=1))


def test_unknown_targets_are_refused():
    with pytest.raises(ValueError, match="on must be one of 'output', 'values', 'position', got 'weights'"):
        Disagreement(on="weights")
