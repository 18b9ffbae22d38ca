import pytest
import torch
from grids import part_of_grid
from methods.weight_hosts import ids, loss_of, model
from naive import PADDING, penalty, qkv, weights

import headwise
from headwise.attend.methods import AttentionNormPenalty, EntropyPenalty
from headwise.testing.calls import attend_with


def test_it_is_the_norm_of_all_maps_over_their_number():
    q, k, v = qkv()
    a = weights(q, k)
    torch.testing.assert_close(
        penalty(AttentionNormPenalty(strength=2.0), q, k, v), 2 * torch.linalg.norm(a) / a.numel()
    )


def test_per_map_is_the_mean_of_each_maps_own():
    q, k, v = qkv()
    maps = weights(q, k).flatten(0, 1)
    wanted = torch.stack([torch.linalg.norm(a) / a.numel() for a in maps]).mean()
    torch.testing.assert_close(penalty(AttentionNormPenalty(per_map=True), q, k, v), wanted)


def test_padding_counts_in_neither_norm_nor_number():
    q, k, v = qkv()
    for per_map in (False, True):
        method = AttentionNormPenalty(per_map=per_map)
        alone = penalty(method, q[1:, :, :4], k[1:, :, :4], v[1:, :, :4])
        torch.testing.assert_close(penalty(method, q[1:], k[1:], v[1:], mask=PADDING[1:]), alone)


def test_only_the_joint_form_shrinks_with_the_batch():
    q, k, v = qkv()
    for per_map, factor in ((False, 0.5), (True, 1.0)):
        method = AttentionNormPenalty(per_map=per_map)
        four = [x.repeat(4, 1, 1, 1) for x in (q, k, v)]
        torch.testing.assert_close(penalty(method, *four), factor * penalty(method, q, k, v))


def test_the_gradient_is_finite_where_no_query_has_a_key():
    q, k, v = qkv(b=1)
    leaf = q.clone().requires_grad_()
    for form in ("fast", "textbook"):
        penalty(
            AttentionNormPenalty(), leaf, k, v, mask=torch.zeros(1, 1, 6, 6, dtype=torch.bool), form=form
        ).backward()
        assert leaf.grad.isfinite().all()


def test_at_strength_0_the_gradients_are_those_without_it_and_a_ramp_may_start_there():
    gradients = []
    for strength in (None, 0.0, headwise.Ramp(start=0.0, end=1.0, steps=10)):
        net = model()
        handle = headwise.regularize(net, AttentionNormPenalty(strength=0.0)) if strength is not None else None
        if isinstance(strength, headwise.Ramp):
            handle.set(AttentionNormPenalty, strength=strength)
        (loss_of(net, ids()) + (handle.loss() if handle else 0.0)).backward()
        gradients.append([p.grad for p in net.parameters()])
    for other in gradients[1:]:
        for plain, got in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("per_map", part_of_grid([False, True], [True]))
def test_in_fp64_values_and_gradients_are_those_of_fp64(per_map):
    leaves = [x.double().requires_grad_() for x in qkv()]
    method = AttentionNormPenalty(per_map=per_map)
    a = weights(*leaves[:2], PADDING)
    found = penalty(method, *leaves, mask=PADDING)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, penalty(method, *leaves, mask=PADDING, form="textbook"), rtol=1e-12, atol=0)
    if not per_map:
        real = torch.stack([*a[0].square().sum((1, 2)), *a[1, :, :4].square().sum((1, 2))]).sum().sqrt()
        torch.testing.assert_close(found, real / (3 * (36 + 16)), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda *x: attend_with([method], *x, mask=PADDING), leaves)


@pytest.mark.parametrize("method", [AttentionNormPenalty(strength=0.0), EntropyPenalty(strength=0.0)], ids=repr)
def test_strength_0_changes_no_bit_in_any_precision(method):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        net = model().to(dtype)
        before = net(ids())
        handle = headwise.regularize(net, method)
        assert torch.equal(net(ids()), before)
        assert handle.loss().detach() == 0
        handle.set(type(method), strength=1.0)
        net(ids())
        assert handle.loss().detach() != 0
        handle.remove()


def test_the_sums_of_penalties_keep_the_models_precision():
    net = model().double()
    handle = headwise.regularize(net, EntropyPenalty(strength=1.0), AttentionNormPenalty(strength=1.0))
    net(ids())
    assert handle.loss().dtype == torch.float64
