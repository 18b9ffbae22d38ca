"""The largest logit from blocks of products is the largest logit of the matrix."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwise.attend.attention import largest_logits as form
from headwise.attend.attention.largest_logits import largest_logits

B, H, T, N, D = 2, 3, 40, 33, 8


def definition(q, k, mask, causal, scale):
    s = q.double() @ k.double().mT * scale
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    return s.amax((-1, -2))


KINDS = {
    "plain": (None, False),
    "causal": (None, True),
    "padded": ((torch.arange(N) < torch.tensor([33, 20])[:, None])[:, None, None], False),
    "padded and causal": ((torch.arange(N) >= torch.tensor([0, 5])[:, None])[:, None, None], True),
    "rows without keys": (torch.rand(B, 1, T, N, generator=torch.Generator().manual_seed(0)) < 0.03, False),
    "nothing allowed": (torch.zeros(1, 1, 1, N, dtype=torch.bool), False),
}


def small_blocks(q, k):
    """Slices of samples, heads and queries of which none holds all."""
    samples, heads, queries = (
        (slice(0, 1), slice(1, B)),
        (slice(0, 2), slice(2, H)),
        (slice(0, 7), slice(7, 36), slice(36, T)),
    )
    return list(itertools.product(samples, heads, queries))


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False])
def test_it_is_the_largest_entry_of_the_matrix(kind, size, whole, monkeypatch):
    if not whole:
        monkeypatch.setattr(form, "blocks", small_blocks)
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(B, H, T, D, generator=g) * size, torch.randn(B, H, N, D, generator=g)
    mask, causal = KINDS[kind]
    got = largest_logits(q, k, mask, causal, 0.3)
    torch.testing.assert_close(got.double(), definition(q, k, mask, causal, 0.3), rtol=1e-5, atol=1e-7)


def test_negative_logits_have_a_negative_largest():
    q, k = -torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    assert largest_logits(q, k, None, True, 1.0).item() == pytest.approx(-8.0, abs=1e-5)


def test_bfloat16_inputs_are_read_exactly():
    q, k = torch.randn(1, 2, 16, 16).bfloat16(), torch.randn(1, 2, 16, 16).bfloat16()
    torch.testing.assert_close(
        largest_logits(q, k, None, False, 0.25).double(), definition(q, k, None, False, 0.25), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("whole", [True, False])
def test_queries_that_do_not_count_are_left_out(whole, monkeypatch):
    if not whole:
        monkeypatch.setattr(form, "blocks", small_blocks)
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(B, H, T, D, generator=g), torch.randn(B, H, N, D, generator=g)
    real = torch.arange(T) < torch.tensor([T, 9])[:, None]
    got = largest_logits(q, k, None, False, 0.3, real)
    wanted = definition(q, k, real[:, None, :, None].expand(B, 1, T, N), False, 0.3)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-7)


def channels_first(*shape, dtype=torch.float32):
    """Return a tensor whose last dimension is not contiguous in memory, as models that keep channels before tokens make
    it."""
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape[:2], shape[3], shape[2], generator=g).to(dtype).transpose(2, 3)


@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_dimension_that_is_not_contiguous_is_read_as_it_is(kind, which):
    q, k = channels_first(B, H, T, D), channels_first(B, H, N, D)
    q, k = (q if which != "k" else q.contiguous()), (k if which != "q" else k.contiguous())
    mask, causal = KINDS[kind]
    got = largest_logits(q, k, mask, causal, 0.3)
    torch.testing.assert_close(got.double(), definition(q, k, mask, causal, 0.3), rtol=1e-5, atol=1e-7)


def test_a_tensor_that_steps_over_channels_is_read_as_it_is():
    q, k = (torch.randn(B, H, n, 2 * D, generator=torch.Generator().manual_seed(n))[..., ::2] for n in (T, N))
    got = largest_logits(q, k, None, False, 0.3)
    torch.testing.assert_close(got.double(), definition(q, k, None, False, 0.3), rtol=1e-5, atol=1e-7)


def test_it_costs_the_products_of_the_matrix_alone():
    q, k = torch.randn(B, H, T, D), torch.randn(B, H, N, D)
    with FlopCounterMode(display=False) as counter:
        form._in_blocks(q, k, None, False, 0.3, None)
    assert counter.get_total_flops() == 2 * B * H * T * N * D


@pytest.mark.parametrize("kind", ["plain", "padded and causal"])
def test_it_is_one_operator_of_a_compiled_graph(kind):
    q, k = torch.randn(B, H, T, D, requires_grad=True), torch.randn(B, H, N, D)
    mask, causal = KINDS[kind]
    real = torch.arange(T)[None] < 30
    compiled = torch.compile(largest_logits, backend="aot_eager", fullgraph=True)
    got = compiled(q, k, mask, causal, 0.3, real, 5.0)
    assert not got.requires_grad
    torch.testing.assert_close(got, largest_logits(q, k, mask, causal, 0.3, real, 5.0), rtol=0, atol=0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(form._largest_logits, (q.detach(), k, mask, causal, 0.3, real, 5.0), test_utils=checks)


def test_half_precision_autocast_does_not_round_the_products():
    q, k = torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got = largest_logits(q, k, None, False, 0.25)
    torch.testing.assert_close(got.double(), definition(q, k, None, False, 0.25), rtol=1e-5, atol=1e-7)
