"""The kinds of calls that models make of the function: each computed as the host would, and as the matrix says."""

import math

import pytest
import torch
import torch.nn.functional as F
from own_models import CausalAttention, CrossAttention, SelfAttention, stack, tokens
from torch import nn

import headwise
from headwise import (
    DropColumn,
    DropHead,
    DropKey,
    FeatScale,
    NeuTRENO,
    RelaxedAttention,
    SymmetricAttention,
    Temperature,
)

B, H, T, N, D = 2, 4, 6, 9, 8
NEUTRAL = (DropHead(p=0.0), DropKey(p=0.0, unit="column"), RelaxedAttention(gamma=0.0))


class Attention(nn.Module):
    """Makes one call with arguments that a test chooses."""

    def __init__(self, heads=H):
        super().__init__()
        self.num_heads = heads
        self.dummy = nn.Parameter(torch.zeros(()))

    def forward(self, q, k, v, **settings):
        return F.scaled_dot_product_attention(q, k, v, **settings)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def three(lead=(B, H), queries=T, keys=N, groups=None):
    kv = (*lead[:-1], groups or lead[-1])
    return draw(*lead, queries, D), draw(*kv, keys, D, seed=1), draw(*kv, keys, D, seed=2)


def relaxed(q, k, v, gamma, *, allowed=None, bias=None, scale=None):
    """Return (1 - gamma) A V + gamma (mean of V over allowed keys), written with the matrix."""
    s = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    s = s if bias is None else s + bias
    allowed = torch.ones_like(s, dtype=torch.bool) if allowed is None else allowed.expand_as(s)
    a = s.masked_fill(~allowed, -torch.inf).softmax(-1)
    uniform = allowed / allowed.sum(-1, keepdim=True)
    return ((1 - gamma) * a + gamma * uniform) @ v


def check(inputs, expected, settings, heads=H):
    """Compare neutral with the host and a strong setting with `expected`, values and gradients."""
    model = Attention(heads)
    plain = model(*inputs, **settings)
    handle = headwise.regularize(model, DropHead(p=0.0), RelaxedAttention(gamma=0.0))
    mask = settings.get("attn_mask")
    if mask is not None and mask.dim() == 3:
        # The function has no fused kernel for these; with the first dimension spelled out it has.
        torch.testing.assert_close(model(*inputs, **settings), plain, rtol=0, atol=1e-6)
    else:
        assert torch.equal(model(*inputs, **settings), plain)
    handle.remove()
    handle = headwise.regularize(model, *NEUTRAL)
    torch.testing.assert_close(model(*inputs, **settings), plain, rtol=0, atol=1e-6)
    handle.set(RelaxedAttention, gamma=0.75)
    out, wanted = model(*inputs, **settings), expected(0.75)
    assert not torch.allclose(out, plain)
    torch.testing.assert_close(out, wanted)
    leaves = [x for x in (*inputs, *settings.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    cotangent = draw(*out.shape, seed=9).detach()
    for got, want in zip(
        torch.autograd.grad(out, leaves, cotangent), torch.autograd.grad(wanted, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(got, want)
    handle.remove()


@pytest.mark.bits
def test_a_plain_call():
    q, k, v = three()
    check((q, k, v), lambda g: relaxed(q, k, v, g), {})


@pytest.mark.bits
@pytest.mark.parametrize("scale", [None, 1.0, 0.05])
def test_the_scale_is_the_hosts(scale):
    q, k, v = three()
    check((q, k, v), lambda g: relaxed(q, k, v, g, scale=scale), {"scale": scale})


@pytest.mark.bits
def test_causality_counts_the_keys_a_query_sees():
    q, k, v = three(keys=T)
    check((q, k, v), lambda g: relaxed(q, k, v, g, allowed=torch.ones(T, T).tril().bool()), {"is_causal": True})


@pytest.mark.bits
def test_causality_with_more_keys_than_queries_counts_from_the_first_key():
    q, k, v = three()
    check((q, k, v), lambda g: relaxed(q, k, v, g, allowed=torch.ones(T, N).tril().bool()), {"is_causal": True})


SHAPES = [(T, N), (1, N), (H, T, N), (1, 1, N), (B, 1, 1, N), (1, H, T, N), (B, H, T, N), (B, 1, T, N)]


@pytest.mark.bits
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_boolean_mask_of_any_shape_allows(shape):
    q, k, v = three()
    mask = draw(*shape) > -0.5
    mask[..., 0] = True
    check((q, k, v), lambda g: relaxed(q, k, v, g, allowed=mask), {"attn_mask": mask})


@pytest.mark.bits
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_float_mask_of_any_shape_is_added_and_learns(shape):
    q, k, v = three()
    bias = draw(*shape)
    check((q, k, v), lambda g: relaxed(q, k, v, g, bias=bias), {"attn_mask": bias})


@pytest.mark.bits
def test_minus_infinity_in_a_float_mask_forbids():
    q, k, v = three()
    hidden = torch.arange(N) > 5
    bias = torch.zeros(N).masked_fill(hidden, -torch.inf).expand(T, N).contiguous()
    check((q, k, v), lambda g: relaxed(q, k, v, g, allowed=~hidden), {"attn_mask": bias})


@pytest.mark.bits
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_queries(groups):
    q, k, v = three(groups=groups)
    kk, vv = (x.repeat_interleave(H // groups, dim=1) for x in (k, v))
    check((q, k, v), lambda g: relaxed(q, kk, vv, g), {"enable_gqa": True})


def test_keys_and_values_that_broadcast_over_the_batch():
    q, _, _ = three()
    k, v = draw(1, H, N, D, seed=1), draw(1, H, N, D, seed=2)
    model = Attention()
    plain = model(q, k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1))
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.0))
    torch.testing.assert_close(model(q, k, v), plain)
    handle.set(RelaxedAttention, gamma=0.75)
    torch.testing.assert_close(model(q, k, v), relaxed(q, k, v, 0.75))
    handle.remove()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lead", [(), (B,), (B, 3, H), (B, 2, 3, H)], ids=str)
def test_calls_of_other_dimensions(lead, masked):
    heads = H if len(lead) > 1 else 1
    q, k, v = draw(*lead, T, D), draw(*lead, N, D, seed=1), draw(*lead, N, D, seed=2)
    bias = draw(*lead[-1:], T, N) if masked else None
    model = Attention(heads)
    plain = model(q, k, v, attn_mask=bias)
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.0))
    torch.testing.assert_close(model(q, k, v, attn_mask=bias), plain)
    handle.set(RelaxedAttention, gamma=0.75)
    torch.testing.assert_close(model(q, k, v, attn_mask=bias), relaxed(q, k, v, 0.75, bias=bias))
    handle.remove()


def test_arguments_by_keyword_and_by_position_are_the_same():
    q, k, v = three(keys=T)

    class ByKeyword(Attention):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(
                value=v, key=k, query=q, attn_mask=None, dropout_p=0.0, is_causal=True, scale=0.3
            )

    class ByPosition(Attention):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3)

    wanted = relaxed(q, k, v, 0.75, allowed=torch.ones(T, T).tril().bool(), scale=0.3)
    for model in (ByKeyword(), ByPosition()):
        handle = headwise.regularize(model, RelaxedAttention(gamma=0.75))
        torch.testing.assert_close(model(q, k, v), wanted)
        handle.remove()


def test_an_unknown_argument_is_the_same_error_as_without():
    q, k, v = three()
    model = Attention()
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.75))
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        model(q, k, v, window=3)
    handle.remove()


@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_a_mask_and_causality_at_once_are_both_kept(kind):
    q, k, v = three()
    mask = draw(T, N) > -0.5
    mask[:, 0] = True
    order = torch.ones(T, N).tril().bool()
    if kind == "bool":
        settings, expected = mask, lambda g: relaxed(q, k, v, g, allowed=mask & order)
    else:
        bias = draw(T, N, seed=4)
        settings = bias if kind == "learned" else bias.detach()
        expected = lambda g: relaxed(q, k, v, g, allowed=order, bias=settings)
    model = Attention()
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.75))
    torch.testing.assert_close(model(q, k, v, attn_mask=settings, is_causal=True), expected(0.75))
    handle.remove()


@pytest.mark.parametrize("method", [DropHead(p=0.0), RelaxedAttention(gamma=0.0)], ids=repr)
def test_the_hosts_dropout_is_the_same_from_the_same_seed(method):
    q, k, v = three()
    model = Attention()
    torch.manual_seed(0)
    plain = model(q, k, v, dropout_p=0.3)
    handle = headwise.regularize(model, method)
    torch.manual_seed(0)
    torch.testing.assert_close(model(q, k, v, dropout_p=0.3), plain)
    handle.remove()


@pytest.mark.bits
def test_evaluation_without_methods_that_act_there_is_the_hosts_own_call():
    q, k, v = three()
    model = Attention().eval()
    plain = model(q, k, v)
    handle = headwise.regularize(model, DropHead(p=0.9), DropColumn(p=0.9), RelaxedAttention(gamma=0.9))
    assert torch.equal(model(q, k, v), plain)
    handle.remove()


def test_a_causal_layer_like_nanogpts_relaxes_over_the_past_alone():
    model, x = stack(CausalAttention), tokens()
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.8), DropKey(p=0.5, unit="column"), DropHead(p=0.3))
    out = model(x)
    later = x.clone()
    later[:, 5:] += 1.0
    handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})
    changed = model(later)
    torch.testing.assert_close(changed[:, :5], out[:, :5])
    assert not torch.allclose(changed[:, 5:], out[:, 5:])
    handle.remove()


def test_a_mean_over_tokens_is_refused_on_a_causal_layer():
    with pytest.raises(ValueError, match="a causal layer generates with only the new one present"):
        headwise.regularize(stack(CausalAttention), FeatScale(), example=tokens())

    class Hidden(SelfAttention):
        causal_now = True

        def forward(self, x):
            q, k, v = self.split(x)
            return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal_now))

    model = stack(Hidden)
    for layer in model.layers:
        layer.causal_now = False
    handle = headwise.regularize(model, FeatScale(), example=tokens())
    for layer in model.layers:
        layer.causal_now = True
    with pytest.raises(RuntimeError, match=r"layers\.0 .*FeatScale"):
        model(tokens())
    handle.remove()


def test_cross_attention_takes_keys_of_another_length():
    torch.manual_seed(0)
    model = CrossAttention()
    x, context = tokens(length=5), tokens(length=11, seed=6)
    plain = model(x, context)
    handle = headwise.regularize(model, DropHead(p=0.0), RelaxedAttention(gamma=0.0), Temperature(value=1.0))
    assert handle.fitted[0].site.is_cross
    torch.testing.assert_close(model(x, context), plain)
    handle.set(RelaxedAttention, gamma=1.0)
    # Uniform weights: what the queries are no longer matters.
    torch.testing.assert_close(model(x, context), model(x + 1.0, context))
    handle.remove()
    with pytest.raises(ValueError, match="SymmetricAttention has no meaning on cross attention"):
        headwise.regularize(model, SymmetricAttention())


def test_pooled_keys_are_refused_by_what_needs_the_queries_own_tokens():
    class Pooled(SelfAttention):
        def forward(self, x):
            q, k, v = self.split(x)
            return self.join(F.scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2]))

    model, x = stack(Pooled), tokens()
    with pytest.raises(ValueError, match="of the same tokens, and this layer pools one of the two"):
        headwise.regularize(model, NeuTRENO(), example=x)
    handle = headwise.regularize(model, NeuTRENO())
    with pytest.raises(
        RuntimeError, match=r"layers\.0 attends from 8 queries to 4 keys, and NeuTRENO|layers\.1 attends from 8"
    ):
        model(x)
    handle.remove()
    handle = headwise.regularize(model, DropHead(p=0.5), RelaxedAttention(gamma=0.5))
    model(x).sum().backward()
    handle.remove()
