"""QKClip: heads whose largest logit passed the threshold are scaled back to it, biases and groups included."""

from __future__ import annotations

import pytest
import torch
from methods.weight_hosts import HEADS, WIDTH, ids, loss_of, model

import headwise
from headwise import DropKey, QKClip, SoftCap, Temperature
from headwise.attend.attention import computation
from headwise.attend.projections import capture

SIZE = WIDTH // HEADS


def logits(net, batch, layer=0):
    """Compute the scaled logits of a layer that causality allows, (B, H, T, N), from its captured q and k."""
    with capture.untouched(net), capture.seen(net.layers[layer]) as calls:
        net(batch)
    q, k = calls[0].q, calls[0].k
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.mT * SIZE**-0.5
    return s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), float("-inf"))


def largest(net, batch, layer=0):
    return logits(net, batch, layer).amax((0, 2, 3))


@pytest.mark.parametrize("balance", [0.5, 0.0, 1.0])
def test_heads_above_the_threshold_land_on_it_and_others_keep_their_bits(balance):
    net, batch = model(), ids()
    threshold = largest(net, batch).sort().values[1].item() * 0.99
    handle = headwise.regularize(net, QKClip(threshold=threshold, balance=balance), where=["layers.0"])
    before, tall = net.layers[0].c_attn.weight.detach().clone(), largest(net, batch)
    loss_of(net, batch)
    handle.after_step()
    now = largest(net, batch)
    want = torch.where(tall > threshold, torch.full_like(tall, threshold), tall)
    torch.testing.assert_close(now, want, rtol=1e-4, atol=1e-5)
    rows = net.layers[0].c_attn.weight.detach()[: 2 * WIDTH].unflatten(0, (2, HEADS, SIZE))
    same = (rows == before[: 2 * WIDTH].unflatten(0, (2, HEADS, SIZE))).flatten(2).all(-1)
    assert same[:, tall <= threshold].all()
    assert same[0, tall > threshold].all() == (balance == 0)
    assert same[1, tall > threshold].all() == (balance == 1)
    assert torch.equal(net.layers[0].c_attn.weight[2 * WIDTH :], before[2 * WIDTH :])


def test_a_group_shares_its_largest_logit():
    net, batch = model(groups=1), ids()
    tall = largest(net, batch)
    handle = headwise.regularize(net, QKClip(threshold=tall.max().item() / 2), where=["layers.0"])
    loss_of(net, batch)
    handle.after_step()
    torch.testing.assert_close(largest(net, batch), tall / 2, rtol=1e-4, atol=1e-5)


def test_all_forwards_of_a_step_count_and_the_next_step_starts_anew():
    net, batches = model(), [ids(seed=0), ids(seed=1)]
    handle = headwise.regularize(net, QKClip(threshold=1e6), where=["layers.0"])
    want = torch.maximum(largest(net, batches[0]), largest(net, batches[1]))
    for batch in batches:
        loss_of(net, batch).backward()
    handle._maxima.settle(handle.fitted)
    state = handle.fitted[0].states[0]
    torch.testing.assert_close(state.tensor("largest"), want, rtol=1e-5, atol=1e-6)
    handle.after_step()
    assert (state.tensor("largest") == float("-inf")).all()


def test_blocks_of_queries_find_the_largest_logit_of_all(monkeypatch):
    net, batch = model(), ids()
    want = largest(net, batch)
    # Beside a method that needs the matrix.
    handle = headwise.regularize(net, QKClip(threshold=1e6), SoftCap(cap=1e5), where=["layers.0"])
    monkeypatch.setattr(computation, "WHOLE", 2 * HEADS * batch.numel())
    loss_of(net, batch)
    torch.testing.assert_close(handle.fitted[0].states[0].tensor("largest"), want, rtol=1e-5, atol=1e-6)


def test_evaluation_does_not_count_and_the_state_dict_stays_plain():
    net = model()
    keys = list(net.state_dict())
    handle = headwise.regularize(net, QKClip())
    net.eval()
    net(ids())
    assert (handle.fitted[0].states[0].tensor("largest") == float("-inf")).all()
    assert list(net.state_dict()) == keys


def test_a_recomputed_layer_counts_once():
    from torch.utils.checkpoint import checkpoint

    net, batch = model(), ids()
    handle = headwise.regularize(net, QKClip(threshold=1e6))
    x = net.embedding(batch)
    checkpoint(net.layers[0], x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(handle.fitted[0].states[0].tensor("largest"), largest(net, batch), rtol=1e-5, atol=1e-6)


def test_training_outputs_are_those_without_it():
    net, batch = model(), ids()
    before = net(batch)
    headwise.regularize(net, QKClip())
    torch.testing.assert_close(net(batch), before, rtol=0, atol=1e-6)


def test_hosts_that_normalise_queries_and_keys_are_refused():
    site = headwise.Site("layer", torch.nn.MultiheadAttention(8, 2), qk_norm=True)
    assert "normalises queries and keys itself" in QKClip().refuse(site)
    site.qk_norm = False
    assert QKClip().refuse(site) is None


@pytest.mark.parametrize(
    ("settings", "message"), [({"threshold": 0.0}, "above 0, got 0.0"), ({"balance": 1.5}, r"\[0, 1\], got 1.5")]
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        QKClip(**settings)


@pytest.mark.parametrize(
    "others", [[Temperature(value=0.1)], [SoftCap(cap=1e4)], [DropKey(p=0.7, unit="column")]], ids=repr
)
@pytest.mark.parametrize("whole", [1 << 24, 64])
def test_other_edits_of_logits_do_not_change_what_the_weights_made(others, whole, monkeypatch):
    net = model()
    alone = headwise.regularize(net, QKClip())
    net(ids())
    wanted = [f.states[0].tensor("largest").clone() for f in alone.fitted]
    alone.remove()
    # On the matrix, and on the matrix in blocks of queries, the same.
    monkeypatch.setattr(headwise.attend.attention.computation, "WHOLE", whole)
    handle = headwise.regularize(net, *others, QKClip())
    net(ids())
    torch.testing.assert_close(handle.fitted[0].states[-1].tensor("largest"), wanted[0])


def test_layers_that_share_their_weights_are_clipped_once_by_their_joint_maximum():
    net = model()
    net.layers[1].c_attn = net.layers[0].c_attn
    handle = headwise.regularize(net, QKClip(threshold=0.01, balance=0.5))
    before = net.layers[0].c_attn.weight.detach()[:WIDTH].clone()
    net(ids()).sum().backward()
    joint = torch.stack([f.states[0].tensor("largest") for f in handle.fitted]).amax(0)
    handle.after_step()
    eta = (0.01 / joint).clamp(max=1).repeat_interleave(SIZE)[:, None]
    torch.testing.assert_close(net.layers[0].c_attn.weight.detach()[:WIDTH], before * eta**0.5)
    handle.remove()
    assert not any("_headwise" in name for m in net.modules() for name in m.__dict__)


@pytest.mark.parametrize("whole", [1 << 24, 64])
def test_padded_queries_do_not_count_so_that_padding_does_not_move_the_maximum(whole, monkeypatch):
    monkeypatch.setattr(headwise.attend.attention.computation, "WHOLE", whole)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    handle = headwise.regularize(net, QKClip(threshold=1e6))
    state, real = handle.fitted[0].states[0], torch.randn(2, 5, WIDTH)

    def seen(x, padding=None):
        state.tensor("largest").fill_(float("-inf"))
        net[0](x, x, x, key_padding_mask=padding, need_weights=whole == 64)
        return state.tensor("largest").clone()

    alone = seen(real)
    padded = torch.cat([real, 50 * torch.randn(2, 4, WIDTH)], dim=1)
    padding = (torch.arange(9) >= 5).expand(2, 9)
    torch.testing.assert_close(seen(padded, padding), alone, rtol=1e-5, atol=1e-6)
    # Without the padding mask these queries are real, and count.
    assert (seen(padded) > 2 * alone).all()


def test_all_layers_are_exchanged_between_processes_at_once(monkeypatch):
    calls = []

    def all_reduce(tensor, op):
        calls.append((tensor.shape, op))
        tensor.mul_(4.0)

    torch.manual_seed(0)
    net = model()
    handle = headwise.regularize(net, QKClip(threshold=0.01, balance=0.0))
    before = [block.c_attn.weight.detach()[WIDTH : 2 * WIDTH].clone() for block in net.layers]
    net(ids()).sum().backward()
    own = [f.states[0].tensor("largest").clone() for f in handle.fitted]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    handle.after_step()
    assert len(own) > 1
    assert calls == [((len(own) * HEADS,), torch.distributed.ReduceOp.MAX)]
    # The other processes' maximum, here four times our own, decides.
    for block, weight, largest in zip(net.layers, before, own, strict=True):
        eta = (0.01 / (4 * largest)).clamp(max=1).repeat_interleave(SIZE)[:, None]
        torch.testing.assert_close(block.c_attn.weight.detach()[WIDTH : 2 * WIDTH], weight * eta)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_a_batch_that_overflows_neither_hides_the_largest_logit_nor_zeroes_weights(bad):
    net, batch = model(), ids()
    tall = largest(net, batch)
    threshold = tall.max().item() / 2
    handle = headwise.regularize(net, QKClip(threshold=threshold), where=["layers.0"])
    loss_of(net, batch).backward()
    hook = net.embedding.register_forward_hook(lambda _, __, out: out * bad)
    loss_of(net, batch).backward()
    hook.remove()
    handle.after_step()
    torch.testing.assert_close(largest(net, batch), tall.clamp(max=threshold), rtol=1e-4, atol=1e-5)
